"""Training: rounds, evaluation and checkpoints of one run, and what can watch it.

- `round_loop`: `run` and `resume`, the rounds and the files of a finished run; start here
- `python_objects`: experiments with arrays, modules and functions instead of names
- `callbacks`: `Callback`, what a run reports while it goes, and `Result`, what it returns
- `trackers`: callbacks for TensorBoard and MLflow
- `checkpoint`: the server's state on disk, with checksums
- `federated_evaluation`: metrics of a federation between machines, from the sites' histograms
"""
