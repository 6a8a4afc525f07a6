"""A site of a real federation. Start with join.py and worker.py.

join              `fedmll join`: connect to the server and serve it until the run is over
server_access     how the server is reached: address, TLS, proxy, clock
check             `fedmll check`: can this site join?
validate          `fedmll validate`: test a model file on the site's data
worker            what a site does for the server: introduce itself, train, evaluate, receive the model
site_config       the site's configuration and limits (Site, SiteLimits), site.json
site_data         the site's images and labels, prepared for a study
site_folder       the site's own folder (--state-dir)
approval          a person approves every study, and a join answers one setup only
released_counts   which label counts have left the site
memory_estimate   how much memory a study needs
benefit_report    compares the federated model with one that the site trains alone: site-report.html
"""
