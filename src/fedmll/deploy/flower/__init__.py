"""A real federation on Flower (flwr 1.41 and 1.42). Nothing outside this package imports flwr.

internals.py   what we use of Flower beyond its public modules: all of it, and nowhere else
records.py     Message ↔ Flower's records: raw arrays, numbers and plain settings, never a pickle
processes.py   starts the SuperLink and the SuperNode as child processes
children.py    what runs in them: Flower's own, with the doors shut that it leaves open
link.py        the server's end of its SuperLink
site_app.py    the ClientApp: any method of the registry at a site
executor.py    runs the ClientApp for a SuperNode in one process that stays (Flower starts one a message)
roster.py      who is connected, by name
post.py        letters to clients and their replies, by deadline
judging.py     a round's updates beside each other: who stands out
engine.py      FlowerEngine: rounds; what runner.py drives
server_app.py  the ServerApp, for Flower's own runtimes (its simulation engine on Ray)
"""
