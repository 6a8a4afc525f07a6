"""Reports: numbers first, then a plot of them. Start with `html_report` (`fedmll report`) or `site_report` (the report
that a site of a federation gets).

html_report    the HTML report of runs and comparisons, with a paragraph on what was run
site_report    the HTML report for one site: is the federated model better than its own?
result_table   the table of results, with ranks and intervals
curves         learning curves, also for `fedmll plot`
charts         the other charts: classes, clients, calibration, thresholds; page.js draws them in the page
chart_drawing  charts drawn with matplotlib
figure         a matplotlib figure with caption and numbers; the style and the files of all figures
figures/       the figures of the model and the data of a run, one module each
"""
