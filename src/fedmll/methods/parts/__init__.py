"""Parts that several methods share, and what they are built from.

averaging, per_label_average, central_tuning     how the server aggregates the weights
proximal_term, semi_supervised, missing_label_detection, correlation_consensus     the clients' training
ridge_head, platt_calibration     the exact linear head from sums, and its calibration
logistic_head, logistic_solver    the exact logistic regression head from sums
classifier_rows, label_correlation, sum_checks     helpers
"""
