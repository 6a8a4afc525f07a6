"""Training: rounds, evaluation and checkpoints of one run, and what can watch it.

- `round_loop`: `run` and `resume`; start here
- `callbacks`: `Callback`, what a run reports while it goes, and `Result`, what it returns
- `trackers`, `mlflow_tracker`: callbacks for TensorBoard and MLflow
- `checkpoint`: the server's state on disk, with checksums
- `artifacts`: the files of a finished run (model, predictions, summary, tables)
- `federated_evaluation`: metrics of a federation between machines, from the sites' histograms
"""
