"""fed-ridge: the exact linear head on frozen features, in one exchange and for any partition (parts/ridge.py).

No round of training follows. With a frozen pretrained backbone (model.freeze = "backbone", model.weights) it is what an
iterative method has to beat; `method.start = "ridge"` starts another method from it.
"""

from fedmll.methods.method import Method
from fedmll.methods.parts.basic import Known
from fedmll.methods.parts.ridge import Ridge


class FedRidge(Method):
    name = "fed-ridge"
    summary = "the exact ridge head from the clients' sums: one exchange, the same for every partition"
    rounds = 0
    parts = (Ridge, Known)
