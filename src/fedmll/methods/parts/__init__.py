"""Parts that several methods share, and what they are built from.

target_losses, averaging     the parts of FedAvg
robust_average, per_label_average, central_tuning     other ways to aggregate
proximal_term, semi_supervised, missing_label_detection, correlation_consensus     parts for the clients' training
ridge_head, platt_calibration     the exact linear head from sums, and its calibration
classifier_rows, label_correlation, prototypes, sum_checks     helpers
"""
