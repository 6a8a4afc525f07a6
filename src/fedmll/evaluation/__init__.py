"""Metrics, their confidence intervals, significance tests, thresholds and calibration. Nothing here knows how a model
was trained. Start with `metric_definitions` (which metrics there are) and `metrics` (how they are computed).

metric_definitions the table of metrics: name, label, direction, unit, where each is shown
metrics            all metrics of probabilities against targets; of each client
ranking            the formulas of AUROC and average precision
site_metrics       metrics by site, and of the classes that only one site annotates
evaluate           all metrics of a trained model on the data of a federation
bootstrap          95 % intervals of metrics, and of differences between models on the same samples
significance       Wilcoxon's test and Holm's correction, for margins between methods
thresholds         choose thresholds for a goal: F1, recall, precision
calibration        reliability curves, calibration error, Platt scaling and temperature scaling
histograms         histograms of scores, which sites send instead of samples
histogram_metrics  metrics of a federation between machines, from these histograms
"""
