"""What every method is written with. Start with `base`; the file of a method imports from here and from `parts/`.

base            Part, Head, Aggregator: what an author implements
client_round    what a part sees on a client: Client, ClientRound, TrainStep, Batch
task            what is fixed in a run and known to server and clients
method          Method: a name, a paper and a list of parts; one round on the server
recipe          which head and parts a method has, and whether they can work together
method_config   the [method] section of an experiment: a method with its options
allowed_replies which tensors and bounds are allowed in a reply, and why one is rejected
contract_checks checks of parts, heads and methods that users write
"""
