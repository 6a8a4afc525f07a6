"""A table with numbers, text, missing values and unknown labels: `python examples/table.py`."""

import csv
import random
from pathlib import Path

import fedmll

random.seed(0)
with Path("patients.csv").open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["age", "smoker", "client", "label:cough", "label:fever"])
    for _ in range(500):
        age, smoker = random.gauss(50, 15), random.choice(["yes", "no", ""])
        cough = random.choice([int(smoker == "yes"), ""])
        table.writerow([round(age), smoker, random.choice(["north", "south"]), cough, int(age > 55)])

result = fedmll.run(out="patients-run", data="table:patients.csv", method="fedavg-pl", rounds=5)
print(result)
print(fedmll.load_model("patients-run/model.safetensors").predict("patients.csv")[:3])
