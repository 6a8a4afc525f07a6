"""Engines train the clients of a round.

base                  what the training loop needs from an engine (start here)
client_trainer        one method with one model: builds, receives, trains, predicts; used everywhere
start                 the engine that an experiment asks for
simulation            what every simulation does, wherever its clients are trained
local                 a simulation on one machine
worker_pool           its worker processes, and the shared memory that passes tensors to them
ray_engine            a simulation on a Ray cluster
ray_cluster           the connection to the cluster, and the versions of its nodes
ray_pool, ray_worker  the jobs: what the driver does, and what runs in an actor
devices               which device trains
client_state          the clients' states on disk
optimizer             the backward pass and the optimizer of a client
vectorized_clients    several clients trained at once (`training.clients_per_batch`)
"""
