"""The command line: parse, call the library, print. Start with `main`.

- `main` — the app, `run` and `resume`
- `options` — options that several commands share; `output`, `display` — printing and progress
- `compare`, `report`, `predict`, `show` — comparisons, reports, predictions and overviews of runs
- `data`, `methods`, `presets` — lists and data commands (also `weights`)
- `server`, `site`, `validate`, `keys`, `audit` — real federations
"""
