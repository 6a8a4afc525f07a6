"""A Hugging Face dataset of vectors and lists of labels: `python examples/hugging_face_dataset.py`."""

import numpy as np
from datasets import Dataset, DatasetDict

import fedmll

NAMES = ["sport", "politics", "science"]
rng = np.random.default_rng(0)


def draw(count):
    x = rng.normal(size=(count, 12))
    labels = [[name for name, value in zip(NAMES, row, strict=False) if value > 0.5] for row in x]
    return Dataset.from_dict({"embedding": x.tolist(), "labels": labels})


data = DatasetDict({"train": draw(500), "test": draw(100)})
print(fedmll.run(data=data, classes=NAMES, method="fed-ridge", clients=5))
