"""Presets of federations: their maps of names fit the sources that they name, and they run on small copies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import official_datasets as official
import pytest

from fedmll.config.experiment import Experiment
from fedmll.config.presets import load_preset, read_federations
from fedmll.core.errors import ConfigError
from fedmll.data import federation
from fedmll.data.sources import chestxray14, chexpert, padchest, voc

VINDR = (  # the header of image_labels_train.csv
    *("Aortic enlargement", "Atelectasis", "Calcification", "Cardiomegaly", "Clavicle fracture", "Consolidation"),
    *("Edema", "Emphysema", "Enlarged PA", "ILD", "Infiltration", "Lung Opacity", "Lung cavity", "Lung cyst"),
    *("Mediastinal shift", "Nodule/Mass", "Pleural effusion", "Pleural thickening", "Pneumothorax"),
    *("Pulmonary fibrosis", "Rib fracture", "Other lesion", "COPD", "Lung tumor", "Pneumonia", "Tuberculosis"),
    *("Other diseases", "No finding"),
)
OWN = {
    "chestxray14": chestxray14.CLASSES,
    "chexpert": chexpert.CLASSES,
    "mimic-cxr": chexpert.CLASSES,
    "padchest": padchest.CLASSES,
    "vindr-cxr": VINDR,
}


def test_each_site_of_the_chest_x_rays_annotates_what_its_map_says() -> None:
    content = read_federations()["chest-x-rays"]
    classes = content["study"]["classes"]
    for site in content["sites"]:
        own, rename = OWN[site["data"]], site.get("rename", {})
        assert set(rename) <= set(own)
        mapped = {rename.get(name, name) for name in own}
        assert mapped & set(classes) == set(site["annotates"]), site["name"]
        assert set(site.get("excludes", {})) <= set(own)
    assert len(classes) == len(set(classes)) == 20


def names_of(preset: str) -> list[str]:
    return [site["name"] for site in load_preset(preset)["sites"]]


def test_sites_of_a_preset_can_be_chosen() -> None:
    assert names_of("preset:chest-x-rays") == ["nih", "chexpert"]
    assert names_of("preset:chest-x-rays/vindr,nih") == ["nih", "vindr"]
    assert len(names_of("preset:chest-x-rays/all")) == 5
    assert "Enlarged Cardiomediastinum" not in load_preset("preset:chest-x-rays/nih,vindr")["study"]["classes"]
    assert load_preset("preset:chest-x-rays/all") == load_preset("preset:chest-x-rays/all")
    with pytest.raises(ConfigError, match="has no site 'nhi'; did you mean 'nih'"):
        load_preset("preset:chest-x-rays/nhi")
    with pytest.raises(ConfigError, match=r"There is no preset 'coco-vok'.*preset:coco-voc"):
        load_preset("preset:coco-vok")


def small(preset: str, root: Path, size: int = 16) -> dict[str, Any]:
    values = load_preset(preset)
    values["data"] |= {"size": size, "root": str(root)}
    return values | {"partition": {"holdout": 0.0}}


def test_chest_x_rays_of_five_hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))
    official.chest(tmp_path / "chestxray14")
    official.chexpert_small(tmp_path / "chexpert")
    official.mimic(tmp_path / "mimic-cxr")
    official.pad(tmp_path / "padchest")
    found = federation.build(Experiment.make(small("preset:chest-x-rays/nih,chexpert,mimic,padchest", tmp_path)))
    assert found.names == ("nih", "chexpert", "mimic", "padchest")
    assert len(found.source.classes) == 20 and found.train.sample_shape == (1, 16, 16)
    column = {name: place for place, name in enumerate(found.source.classes)}
    assert found.annotated[:, column["Fracture"]].tolist() == [False, True, True, True]
    assert found.annotated[:, column["Hernia"]].tolist() == [True, False, False, True]
    assert found.source.sites is not None
    mimic = found.source.labels[found.source.sites == "mimic"]
    assert mimic[0, column["Effusion"]] == 0 and mimic[0, column["Support Devices"]] == -1


def test_coco_and_voc_share_the_classes_of_voc(tmp_path: Path) -> None:
    content = read_federations()["coco-voc"]
    rename = content["sites"][1]["rename"]
    coco = set(COCO_CLASSES)
    assert set(rename) <= set(voc.CLASSES) and len(coco) == 80
    assert {rename.get(name, name) for name in voc.CLASSES} <= coco
    with pytest.raises(Exception, match=r"'coco': '.*/coco' does not exist. Correct its root, or the folder of all"):
        federation.build(Experiment.make(small("preset:coco-voc", tmp_path)))


COCO_NAMES = """
person bicycle car motorcycle airplane bus train truck boat traffic_light fire_hydrant stop_sign parking_meter bench
bird cat dog horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie suitcase frisbee skis snowboard
sports_ball kite baseball_bat baseball_glove skateboard surfboard tennis_racket bottle wine_glass cup fork knife spoon
bowl banana apple sandwich orange broccoli carrot hot_dog pizza donut cake chair couch potted_plant bed dining_table
toilet tv laptop mouse remote keyboard cell_phone microwave oven toaster sink refrigerator book clock vase scissors
teddy_bear hair_drier toothbrush
"""
COCO_CLASSES = [name.replace("_", " ") for name in re.findall(r"\w+", COCO_NAMES)]
