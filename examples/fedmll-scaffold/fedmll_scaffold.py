"""SCAFFOLD — Karimireddy et al., 2020: every gradient + c − c_i; then c_i ← c_i − c + (w_g − w_i)/(τ·lr), c follows."""

from fedmll import Method, Part
from fedmll.methods.contract import Sum


class ControlVariates(Part):
    name = "my-control-variates"
    sends = returns = ("c",)

    def start(self):
        return {"c": 0 * self.weights.parameter_vector}

    def prepare(self, work):
        c = work.received(self.name)["c"]
        return c, work.memory(self.name).get("c", 0 * c), work.client.weights.parameter_vector.clone()

    def adjust(self, work, mine):
        work.client.weights.add_gradient(mine[0] - mine[1])

    def finish(self, work, mine):
        (c, own, start), end = mine, work.client.weights.parameter_vector
        change = (start - end) / (work.steps * self.task.experiment.training.lr) - c
        work.memory(self.name)["c"] = own + change
        return {"c": change}

    def merger(self, state, round, beside):
        return Sum("c", lambda total: {"c": state["c"] + (total / self.task.clients).float()})


class MyScaffold(Method):
    name = "my-scaffold"
    summary = "FedAvg with control variates"
    parts = (*Method.parts, ControlVariates)
