"""A federation between machines on Flower (flwr 1.41 and 1.42). Nothing outside this package imports flwr.

At the server; start with `engine`:
- `engine`: FlowerEngine, which the training loop drives
- `round`: FlowerRound, one attempt of a round: collect → check → judge → aggregate
- `membership`: which clients are connected and accepted
- `transport`: messages to clients and their replies, with deadlines
- `reply_checks`: checks of a single reply
- `outliers`: comparison of the updates of a round
- `site_evaluation`: evaluation of the global model at the sites
- `site_states`: which client states the sites have on their disks
- `superlink`: the server's connection to its SuperLink
- `server_app`: the ServerApp, for Flower's simulation engine on Ray

At a site:
- `client_app`: the ClientApp, which answers the server's messages
- `executor`: runs the ClientApp for a SuperNode in one process that stays

Both:
- `records`: conversion between Message and Flower's records
- `message_limits`: a limit on the size of arrays that Flower assembles
- `child_processes`: starts the SuperLink and the SuperNode as child processes
- `child_main`: what runs in these processes
- `request_guard`, `superlink_port`: checks in front of the SuperLink's HTTP app
- `flower_internals`: everything that is used of Flower beyond its public modules
"""
