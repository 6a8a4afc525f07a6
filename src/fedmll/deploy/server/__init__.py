"""The server of a federation between machines. Start with `serve`.

- `serve`: starts or resumes a run, waits for the clients, trains, delivers the model
- `server_settings`: clients, deadlines, address and keys (server.json)
- `study`: which experiments can be federated, and what sites receive of them
- `server_data`: the server's own test data
- `site_federation`: the Federation as the server knows it, from the clients' introductions
- `label_sets`: registered label sets of clients with private labels
- `console`: the operator's messages, log and audit log
- `status`, `status_page`: the status page
- `exclusions`: clients that the operator excludes from a running federation
- `rehearsal`: a federation on one machine
"""
