"""SCAFFOLD — Karimireddy et al., 2020: every gradient + c − c_i; then c_i ← c_i − c + (w_g − w_i)/(τ·lr), c follows."""

from fedmll import Method, Part


class ControlVariates(Part):
    name = "my-control-variates"
    sends = sums = ("c",)

    def initial_state(self):
        return {"c": 0 * self.weights.parameter_vector}

    def on_round_start(self, client_round):
        c = self.received(client_round)["c"]
        return c, self.client_state(client_round).get("c", 0 * c), client_round.weights.parameter_vector.clone()

    def on_gradients(self, client_round, round_state):
        client_round.weights.add_gradient(round_state[0] - round_state[1])

    def on_round_end(self, client_round, round_state):
        (c, own, start), end = round_state, client_round.weights.parameter_vector
        change = (start - end) / (client_round.steps * self.task.experiment.training.lr) - c
        self.client_state(client_round)["c"] = own + change
        return {"c": change}

    def update_state(self, state, sums, round):
        return {"c": (state["c"] + sums["c"] / self.task.clients).float()}, {}


class MyScaffold(Method):
    name = "my-scaffold"
    summary = "FedAvg with control variates"
    parts = (*Method.parts, ControlVariates)
