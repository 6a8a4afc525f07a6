"""Experiments: what a user configures. Start with `experiment.Experiment`.

- `experiment` — `Experiment`: all settings of a run; `Experiment.load(file)`, `Experiment.make(values)`
- `settings` — the sections of an experiment: each setting with its type, range and description
- `resolve` — `load_plugins` and `resolve`: import plug-in files, decide "auto", check names and method options
- `toml_values` — TOML values: read, merge overrides, explain validation errors
- `presets` — the experiments of papers' tables

Validating an experiment imports no code and looks at no registry; `resolve` does.
"""
