"""Comparisons: methods × seeds on the same data, with tables, tests and a record of what was run.

- `compare`: the function `compare`; runs what is not done yet, one run after the other or several at a time; start here
- `plan`: the rows of a comparison and the settings that are tried for each (--methods, --vary, --tune)
- `results`: `Comparison`, its rows and cells, and the main tables
- `statistics`: margins between rows, with tests
- `tables`: table.md, .csv and .tex
- `comparison_folder`: `ComparisonFolder`, the one reader and writer of a comparison's folder
- `parallel_runs`: several runs at a time, each in its own process
- `reproduce`: the tables of papers, beside the published figures; `reproduction_record`: its record, for reports
- `compared_runs`: the runs and comparisons in some folders, for a report
"""
