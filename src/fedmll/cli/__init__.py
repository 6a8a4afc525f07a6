"""The command line: parse, call the library, print. Start with `main`.

- `main`: the app, `run` and `resume`
- `options`: options that several commands share; `output`, `display`: printing and progress
- `compare`, `reproduce`, `predict`: comparisons; tables of papers; trained models (also export, errors, tune)
- `runs`: the folders of runs and comparisons (show, runs, report, plot)
- `data`: data sources and initial weights; `methods`: methods
- `server`, `site`, `security`: real federations (server, exclude; check, join, validate; keys, audit)
"""
