"""Experiments: what a user configures. Start with `experiment.Experiment`.

- `experiment` — `Experiment`: all settings of a run; `Experiment.load(file)`, `Experiment.make(values)`
- `settings` — the sections of an experiment: each setting with its type, range and description
- `resolve` — decide "auto", fill in the method's options, look up names, check combinations
- `toml_values` — TOML values: read, merge overrides, explain validation errors
- `presets` — the experiments of papers' tables

Validating an experiment imports no code and looks at no registry; `resolve` does.
"""
