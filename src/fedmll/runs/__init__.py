"""Runs on disk: the files of a run's folder, how they are read and written.

- `run_folder`: `RunFolder`, the one reader and writer of a run's folder; start here
- `run_overview`: `RunRecord`, everything that a folder says about its run; unreadable files are named, never fatal
- `array_files`: the two array files of a finished run, predictions and client labels
- `formatting`: numbers, results and tables as text, HTML, JSON and CSV
"""
