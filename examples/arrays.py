"""Arrays in, a trained model out: `python examples/arrays.py`. -1 or NaN is an unknown label."""

import numpy as np

import fedmll

rng = np.random.default_rng(0)
x = rng.normal(size=(600, 20))
y = (x @ rng.normal(size=(20, 4)) > 1).astype(float)
y[rng.random(y.shape) < 0.1] = np.nan
hospitals = rng.choice(["north", "south", "west"], size=len(x))

data = {"x": x, "y": y, "clients": hospitals, "classes": ["cough", "fever", "rash", "pain"]}
result = fedmll.run(data=data, method="fedprox", rounds=5)
print(result)
