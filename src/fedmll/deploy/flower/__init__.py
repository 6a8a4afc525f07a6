"""A federation between machines on Flower (flwr 1.41 and 1.42). Nothing outside this package imports flwr.

At the server; start with `engine`:
- `engine`: FlowerEngine, which the training loop drives
- `round`: one round: messages to the clients, their replies until the deadline, judging and aggregation
- `membership`: which clients are connected and accepted
- `reply_checks`: checks of a single reply
- `outliers`: comparison of the replies of a round
- `site_evaluation`: evaluation of the global model at the sites
- `superlink`: the server's connection to its SuperLink
- `request_guard`: what the SuperLink's port accepts

At a site:
- `client_app`: the ClientApp, which answers the server's messages
- `executor`: runs the ClientApp for a SuperNode in one long-running process

Both:
- `records`: conversion between Message and Flower's records
- `child_processes`: the SuperLink and the SuperNode as child processes
- `flower_internals`: everything that is used of Flower beyond its public modules
"""
