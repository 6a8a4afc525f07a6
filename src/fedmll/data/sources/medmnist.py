"""`medmnist:dermamnist`, `medmnist:chestmnist_64`, …: the 2-D sets of MedMNIST, in every published size.

Yang, Shi, Wei et al., MedMNIST v2, Scientific Data 2023. https://medmnist.com , https://zenodo.org/records/10519652 ;
CC BY 4.0, of DermaMNIST CC BY-NC 4.0. `fedmll data get medmnist:dermamnist` fetches one.

DIR/dermamnist.npz       28 × 28; dermamnist_64.npz, _128 and _224 are larger
     train_images, val_images, test_images    uint8 (N, side, side) or (N, side, side, 3)
     train_labels, val_labels, test_labels    (N, 1) class numbers; of ChestMNIST (N, 14) with 1 and 0

The official split has validation data. ChestMNIST has several labels per image, the others one:
`ml-medmnist:dermamnist` makes composites of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.core.registry import register
from fedmll.core.text import suggest
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.images.decode import resized
from fedmll.data.images.problems import Problems
from fedmll.data.sources.base import DownloadableFile, Source, SourceRequest, data_missing
from fedmll.data.sources.npz import read_npz
from fedmll.data.targets import check_positives, parse_targets

ORGANS = (
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left"),
    *("lung-right", "pancreas", "spleen"),
)
CLASSES: dict[str, tuple[str, ...]] = {
    "pathmnist": (
        *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa"),
        *("cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
    ),
    "chestmnist": (
        *("atelectasis", "cardiomegaly", "effusion", "infiltration", "mass", "nodule", "pneumonia", "pneumothorax"),
        *("consolidation", "edema", "emphysema", "fibrosis", "pleural", "hernia"),
    ),
    "dermamnist": (
        *("actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma", "benign keratosis-like lesions"),
        *("dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions"),
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "retinamnist": ("grade 0", "grade 1", "grade 2", "grade 3", "grade 4"),
    "breastmnist": ("malignant", "normal, benign"),
    "bloodmnist": (
        *("basophil", "eosinophil", "erythroblast", "immature granulocytes", "lymphocyte", "monocyte"),
        *("neutrophil", "platelet"),
    ),
    "tissuemnist": (
        *("Collecting Duct, Connecting Tubule", "Distal Convoluted Tubule", "Glomerular endothelial cells"),
        *("Interstitial endothelial cells", "Leukocytes", "Podocytes", "Proximal Tubule Segments"),
        "Thick Ascending Limb",
    ),
    "organamnist": ORGANS,
    "organcmnist": ORGANS,
    "organsmnist": ORGANS,
}
SIZES = ("", "_64", "_128", "_224")
PARTS = ("train", "val", "test")
COUNTS = {  # training, validation and test images, the same in every size; of the organs they differ between versions
    "pathmnist": (89996, 10004, 7180),
    "chestmnist": (78468, 11219, 22433),
    "dermamnist": (7007, 1003, 2005),
    "octmnist": (97477, 10832, 1000),
    "pneumoniamnist": (4708, 524, 624),
    "retinamnist": (1080, 120, 400),
    "breastmnist": (546, 78, 156),
    "bloodmnist": (11959, 1712, 3421),
    "tissuemnist": (165466, 23640, 47280),
}
MD5 = {  # of the 28-pixel files
    "pathmnist": "a8b06965200029087d5bd730944a56c1",
    "chestmnist": "02c8a6516a18b556561a56cbdd36c4a8",
    "dermamnist": "0744692d530f8e62ec473284d019b0c7",
    "octmnist": "c68d92d5b585d8d81f7112f81e2d0842",
    "pneumoniamnist": "28209eda62fecd6e6a2d98b1501bb15f",
    "retinamnist": "bd4c0672f1bba3e3a89f0e4e876791e4",
    "breastmnist": "750601b1f35ba3300ea97c75c52ff8f6",
    "bloodmnist": "7053d0359d879ad8a5505303e11de1dc",
    "tissuemnist": "ebe78ee8b05294063de985d821c1c34b",
}
ZENODO = "https://zenodo.org/records/10519652/files"


def load(request: SourceRequest) -> Splits:
    name = Path(request.argument).name.removesuffix(".npz")
    kind = name.partition("_")[0]
    if kind not in CLASSES or name.removeprefix(kind) not in SIZES:
        known = [known + size for known in CLASSES for size in SIZES]
        raise DataError(f"There is no 2-D set '{name}' in MedMNIST{suggest(name, known)}")
    file = None if request.root is None else request.root / f"{name}.npz"
    if file is None or not file.is_file():
        raise data_missing(
            f"medmnist:{name}",
            request.root,
            f"the file {name}.npz",
            f"Get it with `fedmll data get medmnist:{name} --root DIR`, or from https://zenodo.org/records/10519652.",
        )
    arrays = read_npz(file, [f"{part}_{what}" for part in PARTS for what in ("images", "labels")])
    problems = Problems(f"'{file}'")
    for part in PARTS:
        _check(arrays[f"{part}_images"], arrays[f"{part}_labels"], part, len(CLASSES[kind]), problems)
    problems.report()
    train, validation, test = (_dataset(arrays, part, kind, file, request) for part in PARTS)
    if request.require_positives:
        check_positives(train, f"'{file}'")
    return Splits(train, test, validation)


def _check(images: NDArray[Any], labels: NDArray[Any], part: str, classes: int, problems: Problems) -> None:
    square = images.ndim in (3, 4) and images.shape[1] == images.shape[2] and images.shape[3:] in ((), (3,))
    if images.dtype != np.uint8 or not square:
        problems.add(
            f"'{part}_images' must be uint8 (N, side, side) or (N, side, side, 3); it is {images.dtype} {images.shape}."
        )
    if labels.ndim != 2 or labels.shape[1] not in (1, classes) or labels.dtype.kind not in "iu":
        problems.add(
            f"'{part}_labels' must be whole numbers (N, 1) or (N, {classes}); it is {labels.dtype} {labels.shape}."
        )
    if len(images) != len(labels):
        problems.add(f"there are {len(images)} {part} images and {len(labels)} labels of them.")


def _dataset(arrays: dict[str, NDArray[Any]], part: str, kind: str, file: Path, request: SourceRequest) -> Dataset:
    images, labels, classes = arrays[f"{part}_images"], arrays[f"{part}_labels"], CLASSES[kind]
    planes = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    store = resized(np.ascontiguousarray(planes), request.size, request.progress)
    numbers = labels if kind == "chestmnist" else labels[:, 0]
    return Dataset(store, parse_targets(numbers.astype(np.int64), classes, f"'{file}', {part}_labels"), classes)


register("source", "medmnist")(
    Source(
        description="a 2-D set of MedMNIST, e.g. medmnist:dermamnist, medmnist:chestmnist_64; --root DIR with the npz",
        load=load,
        available=lambda root: root is not None and any((root / f"{name}.npz").is_file() for name in CLASSES),
        file="SET",
        licence="CC BY 4.0; dermamnist CC BY-NC 4.0",
        published={
            name + size: dict(zip(("train", "validation", "test"), counts, strict=True))
            for name, counts in COUNTS.items()
            for size in SIZES
        },
        downloads={
            name: (DownloadableFile(f"{ZENODO}/{name}.npz?download=1", f"md5:{md5}"),) for name, md5 in MD5.items()
        },
    )
)
