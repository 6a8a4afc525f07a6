"""Reports: numbers first, then a plot of them. Start with `html_report` (`fedmll report`) or `site_report` (the report
that a site of a federation gets).

html_report         the HTML report of runs and comparisons
site_report         the HTML report for one site: is the federated model better than its own?
result_table        the table of results, with ranks and intervals
descriptions        the paragraph on what was run, and the settings
curves              learning curves, also for `fedmll plot`
class_charts        performance of each class by its frequency
client_charts       labels of each client, and what each client gains
calibration_charts  reliability curves, and metrics by threshold
chart               the numbers of a chart; page.js draws them in the page
chart_files         charts and figures as PNG, SVG and CSV
figure              a matplotlib figure with caption and numbers; the style of all figures
run_figures         all figures of the model of one run
figures/            these figures, one module each
"""
