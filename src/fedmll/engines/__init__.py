"""Engines train the clients of a round.

base                  what the training loop needs from an engine (start here)
client_trainer        one method with one model: builds, receives, trains, predicts; used everywhere
local                 the engine of a simulation on one machine
worker_pool           its worker processes, and the shared memory that passes tensors to them
client_state          the clients' states on disk
optimizer             the backward pass and the optimizer of a client
vectorized_clients    several clients trained at once (`training.clients_per_batch`)
"""
