"""Real federations between machines: a server, and sites that keep their data.

- `server/`: the server; start with `server/serve.py`
- `site/`: a site that joins or validates; start with `site/join.py`
- `security/`: keys, certificates and the audit log
- `flower/`: messages and rounds on Flower; nothing else imports Flower
- `experiment_for_sites`: what a server asks its sites to take part in (StudySetup), and its digest
- `introduction`: what a client tells the server about itself when it joins
- `label_counts`: the label counts that the operator sees before round 1
- `file_references`: files that an experiment refers to, by their digest
- `model_delivery`: the final model goes to every site
- `error_codes`: why the server rejects a client, and errors at a site: codes and texts
"""
