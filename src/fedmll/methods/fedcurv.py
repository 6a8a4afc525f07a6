"""FedCurv — Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef and Zeitak, "Overcoming Forgetting in Federated
Learning on Non-IID Data", 2019.

A client's loss + λ Σ_{j≠i} Σ u_j (θ − θ_j)². u_j is the diagonal of client j's Fisher information at its trained
weights θ_j. Up to a constant, the penalty is λ Σ [θ² (U − u_i) − 2θ (V − v_i)] with U = Σ u_j and V = Σ u_j θ_j. Its
gradient is 2λ [(U − u_i) θ − (V − v_i)].

The sums are those of the previous round, and the server tells each client whether it contributed to them. A client
sends only u; the server computes v = u θ from the weights. u is computed over all known entries of the client's data:

    u = mean over (sample, class) of p (1 − p) (∂z/∂θ)²,

the expectation over the model's own p, as the Fisher information is defined (not the squared gradients of the loss).
Instead of one backward pass per class there is one pass with random signs, (∂/∂θ Σ_c ±√(p_c(1 − p_c)) z_c)². It is
exact for weights that belong to one class (the rows of the head) and unbiased for all others.

λ = 0.1 is the value of the baseline in FedNCA-ML's released code; the paper tunes it and gives no single value. The
penalty is not in the reported loss, because a client does not know its constant Σ u_j θ_j².
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedmll.core import small_groups
from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.base import Part, PartOptions, Records, TensorSpec, option, vectorized
from fedmll.methods.framework.client_round import ClientInfo, ClientRound
from fedmll.methods.framework.method import Method
from fedmll.models.network import Network

AT_ONCE = 2**24  # how many numbers of per-sample gradients are in memory at once
LARGEST = 1e6  # larger values of u are rejected: no trained model has them


class CurvaturePenalty(Part):
    """λ Σ u_j (θ − θ_j)² over the other clients of the previous round."""

    name = "curvature"
    conflicts = frozenset({"private-labels", "local-models"})
    sums = ("u", "v", "counted")

    class Options(PartOptions):
        strength: float = option(0.1, "λ: strength of the penalty λ Σ_{j≠i} u_j (θ − θ_j)²", ge=0)

    def initial_state(self) -> Tensors:
        nothing = torch.zeros(self.weights.parameter_end)
        return {"u": nothing, "v": nothing.clone(), "counted": torch.zeros(self.task.clients, dtype=torch.bool)}

    def send(self, state: Tensors, client: ClientInfo, round: int) -> Tensors:
        return {"u": state["u"], "v": state["v"], "counted": state["counted"][client.index]}

    def on_round_start(self, client_round: ClientRound) -> tuple[Tensor, Tensor]:
        """U − u_i and V − v_i."""
        sums, own = self.received(client_round), self.client_state(client_round)
        if bool(sums["counted"]) and own:  # without its state, a client's own last model is part of the penalty
            return sums["u"] - own["u"], sums["v"] - own["v"]
        return sums["u"], sums["v"]

    @vectorized
    def on_gradients(self, client_round: ClientRound, others: tuple[Tensor, Tensor]) -> None:
        weights = client_round.weights
        u, v = others
        weights.add_gradient(u * weights.parameter_vector - v, 2 * self.options.strength)

    def on_round_end(self, client_round: ClientRound, others: tuple[Tensor, Tensor]) -> Tensors:
        u = fisher(client_round)
        self.client_state(client_round).update(u=u, v=u * client_round.weights.parameter_vector)
        return {"u": u}

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        return {"u": TensorSpec(tuple(sent["u"].shape), low=0, high=LARGEST)}

    def summands(self, client: ClientInfo, reply: Message) -> Tensors:
        u, clients = reply["u"].double(), torch.arange(self.task.clients)
        return {"u": u, "v": u * reply["weights"][: len(u)], "counted": clients == client.index}

    def update_state(self, state: Tensors, sums: Tensors, round: int) -> tuple[Tensors, Records]:
        return {"u": sums["u"].float(), "v": sums["v"].float(), "counted": sums["counted"] > 0}, {}


def fisher(client_round: ClientRound) -> Tensor:
    """u of the client's model as it is now, over its known entries; 0 if nothing is known. The head's row of a class
    would show the features of the samples with that class, so classes that may not leave the site count as unknown."""
    client, model = client_round.client, client_round.model.eval()
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    size = client.weights.parameter_end
    single = vmap(grad(_probe), in_dims=(None, None, 0, 0), chunk_size=max(1, AT_ONCE // size))
    total, entries = torch.zeros(size, dtype=torch.float64, device=client.task.device), 0
    generator = client.generator("fisher")
    targets = small_groups.mask_small_groups(client.targets, client.task.min_group_size)
    for batch in client.evaluation_batches():
        known = (targets.index_select(0, batch.rows.to(targets.device)) >= 0).float()
        signs = torch.randint(2, known.shape, generator=generator).to(known) * 2 - 1
        with sdpa_kernel(SDPBackend.MATH):  # the only kernel that supports per-sample gradients
            gradients = single(parameters, model, client_round.transform_images(batch.images), signs * known)
        total += torch.cat([gradients[name].square().sum(0).flatten() for name in parameters])
        entries += int(known.sum())
    return (total / max(1, entries)).float()


def _probe(parameters: Tensors, model: Network, image: Tensor, signs: Tensor) -> Tensor:
    """Σ_c ±√(p_c(1 − p_c)) z_c of one sample; only z is differentiated."""
    logits: Tensor = functional_call(model, parameters, (image[None],))[0]
    p = torch.sigmoid(logits).detach()
    return (signs * (p * (1 - p)).sqrt() * logits).sum()


class FedCurv(Method):
    name = "fedcurv"
    summary = "FedAvg with the penalty λ Σ u_j (θ − θ_j)² on changing weights that matter to other clients"
    paper = "Shoham et al., 2019"

    up = "the diagonal of its Fisher information (as large as the model)"
    down = "two sums of the previous round (twice as large as the model)"
    remembers = "what it added to these sums (twice as large as the model)"
    parts = (*Method.parts, CurvaturePenalty)
