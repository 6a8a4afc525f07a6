"""`fedmll run` imports no slow library before the first step. `python benchmarks/startup.py` measures the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

# Commands and what they stand on as `fedmll run` imports them, then data, partition, model and the server's state.
WAY = """
import json, sys, tempfile
from pathlib import Path
import fedmll.cli.main
from fedmll.testing import experiment
made = experiment()
from fedmll.cli import display
from fedmll.training import round_loop, trackers
from fedmll.data import federation
from fedmll.engines.start import LocalEngine
engine = LocalEngine(federation.build(made), Path(tempfile.mkdtemp()))
engine.initial_state()
print(json.dumps(sorted(sys.modules)))
"""
SLOW = {
    "torch._dynamo": "two seconds, with sympy, pandas and scikit-learn",
    "sympy": "",
    "sklearn": "a second; the embedded digits are read from its file",
    "pandas": "",
    "scipy.stats": "most of a second; only comparisons use it",
    "scipy.optimize": "",
    "matplotlib": "only pictures",
    "jinja2": "only the report",
    "flwr": "only real federations",
    "ray": "only simulations on Ray",
    "cryptography": "",
    "transformers": "only text encoders",
    "mlflow": "only where it is asked for",
    "tensorboard": "",
    "pydicom": "only DICOM files",
    "onnx": "only exports",
}


def test_run_imports_no_slow_library_before_the_first_step() -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    said = subprocess.run([sys.executable, "-c", WAY], env=environment, check=True, capture_output=True, text=True)
    loaded = set(json.loads(said.stdout))
    assert {"torch", "numpy", "fedmll.training.round_loop", "fedmll.methods.fedharmony"} <= loaded
    assert sorted(loaded & set(SLOW)) == []
