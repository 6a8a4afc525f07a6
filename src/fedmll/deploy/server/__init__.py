"""The server of a federation between machines. Start with `serve`.

- `serve`: starts or resumes a run, waits for the clients, trains, delivers the model
- `server_settings`: clients, deadlines, address and keys (server.json)
- `site_federation`: the Federation as the server knows it: its own test data and the clients' introductions
- `console`: the operator's messages, log and audit log
- `status`: the status of a run, as a web page, JSON and Prometheus metrics
- `exclusions`: clients that the operator excludes from a running federation
- `rehearsal`: a federation on one machine
"""
