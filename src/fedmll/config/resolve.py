"""Resolve an experiment: decide "auto", fill in the method's options, look up names, check combinations.

This is separate from validation because it imports code. `Experiment.make`, `Experiment.load` and every entry point
(`run`, `compare`, the command line) call it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedmll.config.settings import (
    AUTO,
    RUN,
    SITES,
    ClientPartition,
    DataSettings,
    MethodSettings,
    ModelSettings,
    PartitionSettings,
)
from fedmll.config.toml_values import flatten, merge_overrides, validate, without_none
from fedmll.core import registry
from fedmll.core.errors import ConfigError

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment

DEFAULT_CLIENTS = 10
LAST_STAGE: dict[str, Any] = {"stages": (), "power": "none", "flip_average": False}
# The features of a frozen backbone for heads that use means, chosen on validation data (docs/results/frozen-coco.md).
# Backbones that are not listed have not been measured: they keep the mean of the last stage.
FROZEN_FEATURES: dict[str, dict[str, Any]] = {
    "mobilenet-v2": {"stages": (17, 16, 13), "power": "sqrt", "flip_average": True}
}
TRANSFORMERS = ("vit", "small-vit")  # backbones with a class token


def resolve(experiment: Experiment) -> tuple[Experiment, tuple[str, ...]]:
    """A complete copy of an experiment, and messages about settings that were decided by a rule.

    Every default is written out and every "auto" that needs no data is decided, so that the saved file is complete.
    Settings that the data determines are decided by `Experiment.settled`. Resolving twice changes nothing.

    Raises:
        ConfigError: a name is not registered, an option of the method is wrong, or settings exclude each other.
    """
    method = registry.find("method", experiment.method.name)
    requested = MethodSettings(name=experiment.method.name, **method.canonical_options(experiment.method.options))
    experiment = experiment.model_copy(update={"method": requested})
    config = method.configure(requested.options, lambda schema, values: validate(schema, values, "method"))
    decided = config.resolve(experiment)
    options = merge_overrides(config.options.model_dump(), {name: value for name, (value, _) in decided.items()})
    notes = tuple(f"method.{name} = {value} ({why})" for name, (value, why) in decided.items() if why)
    experiment = _resolve_sites(experiment)
    sites = experiment.sites or ()
    names = [site.source for site in sites] or [experiment.data.source]
    source = registry.all_of("source").get(names[0])  # None: a server without data
    has_features = source is not None and not source.images
    may_be_natural = bool(sites) or (source is not None and source.has_clients)
    updates: dict[str, Any] = {
        "method": MethodSettings(name=requested.name, **without_none(options)),
        "training": experiment.training.model_copy(update=_training_updates(experiment, method, config)),
        "model": _resolve_model(experiment.model, has_features),
    }
    if experiment.partition.clients is None and experiment.partition.kind not in ("natural", "file", AUTO, SITES):
        updates["partition"] = experiment.partition.model_copy(update={"clients": DEFAULT_CLIENTS})
    resolved = experiment.model_copy(update=updates)
    _check_names(resolved, has_features)
    _check_participation(resolved, may_be_natural)
    _check_views(resolved, has_images=not has_features)
    _ = resolved.data.reading  # raises if the window is empty or a column is named twice
    config = method.configure(resolved.method.options)
    _check_none(options, config.options.model_dump())
    config.check(resolved)
    return resolved, notes


def _resolve_sites(experiment: Experiment) -> Experiment:
    """Name the data of [[sites]], make their folders absolute, and reject settings that each site has for itself."""
    data, partition, sites = experiment.data, experiment.partition, experiment.sites
    if sites is None:
        if data.name == SITES:
            raise ConfigError("data.name = 'sites' needs [[sites]]: one for each site, with its name and its data.")
        return experiment
    if data.name not in (SITES, DataSettings().name) or (data.name != SITES and "name" in data.model_fields_set):
        raise ConfigError(f"data.name = '{data.name}' and [[sites]] exclude each other; leave one of them out.")
    for setting in ("classes", "ignore", "group", "uncertain_labels", "encoding"):
        if getattr(data, setting):
            raise ConfigError(f"data.{setting} is for data from one source; with [[sites]], write it into each site.")
    default = PartitionSettings()
    differing = [name for name in ClientPartition.model_fields if getattr(partition, name) != getattr(default, name)]
    if partition.kind in (SITES, "file"):
        differing.remove("kind")
    if differing:
        raise ConfigError(
            f"partition.{differing[0]} is for data from one source; with [[sites]], each site says how it is divided "
            "([sites.partition])."
        )
    if experiment.annotation.kind != "none":
        raise ConfigError(
            f"annotation.kind = '{experiment.annotation.kind}': with [[sites]] the sources say which classes are "
            "annotated. Leave it out."
        )
    names = [site.name for site in sites]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"[[sites]]: two sites have the name '{twice}'. Rename one of them.")
    resolved = []
    for site in sites:
        root = site.root if site.root is None or data.root is not None else site.root.expanduser().absolute()
        resolved.append(site.model_copy(update={"root": root}))
        if site.partition is not None and site.partition.kind in ("feature-skew", "file", SITES):
            raise ConfigError(
                f"[[sites]] '{site.name}': partition.kind = '{site.partition.kind}' is for all data, not for one site."
            )
        _ = site.reading  # raises if the window is empty or a column is named twice
    named = data.model_copy(update={"name": SITES})
    return experiment.model_copy(update={"data": named, "sites": tuple(resolved)})


def _training_updates(experiment: Experiment, method: Any, config: Any) -> dict[str, Any]:
    updates: dict[str, Any] = {}
    if experiment.training.keep == AUTO:
        updates["keep"] = method.keep
    if (rounds := config.fixed_rounds) is not None:
        updates["rounds"] = rounds
    elif not experiment.training.rounds:
        raise ConfigError(f"training.rounds = 0: '{method.name}' would learn nothing. Set 1 or more.")
    return updates


def _resolve_model(model: ModelSettings, has_features: bool) -> ModelSettings:
    """The backbone, its features, the initial bias, the scaling of pixels that the initial weights expect, and the stem
    of a ResNet."""
    updates: dict[str, Any] = {}
    backbone = model.backbone
    if backbone == AUTO:
        backbone = updates["backbone"] = "mlp" if has_features else "convnet"
    # a plug-in or an object may have weights of its own
    own_weights = backbone.startswith(registry.OBJECT_PREFIX) or backbone in registry.find_added("backbone")
    if model.freeze != "none" and model.weights is None and not own_weights and (backbone != "mlp" or model.channels):
        raise ConfigError(
            f"model.freeze = '{model.freeze}' without model.weights would freeze random weights: the features of an "
            f"untrained {backbone} are noise. Set model.weights (a name of `fedmll weights list`, a file, or "
            "run:FOLDER), leave model.freeze out, or set model.weights = 'random' if you want random features."
        )
    frozen = model.freeze == "backbone"
    if model.standardise is True and not frozen:
        raise ConfigError(
            "model.standardise = true is for model.freeze = 'backbone': the features of a backbone that is trained "
            "change in every round. Leave it out."
        )
    if model.pools_stages and (not frozen or has_features):
        raise ConfigError(
            "model.stages, model.power and model.flip_average are for images and model.freeze = 'backbone'; leave them "
            "out."
        )
    if model.class_token and backbone not in TRANSFORMERS and not own_weights:
        raise ConfigError(
            f"model.class_token = true, but a {backbone} has no class token. Leave it out, or set model.backbone to "
            "'vit'."
        )
    features = FROZEN_FEATURES.get(backbone, LAST_STAGE) if frozen and not has_features else LAST_STAGE
    updates |= {key: value for key, value in features.items() if getattr(model, key) == AUTO}
    updates["standardise"] = frozen if model.standardise == AUTO else model.standardise
    updates["bias"] = ("prior" if frozen else "zero") if model.bias == AUTO else model.bias
    pretrained = model.pretrained
    if backbone == "small-vit" and not model.channels:
        raise ConfigError("model.channels is empty: a small-vit has as many layers as it has numbers. Set [64, 64].")
    if pretrained is not None and model.pixel_mean is None and model.pixel_std is None:
        kind = "run" if pretrained.startswith(RUN) else backbone
        rules = registry.all_of("pixels")
        updates["pixel_mean"], updates["pixel_std"] = rules.get(kind, rules["imagenet"])(pretrained)
    elif len(model.pixel_mean or ()) != len(model.pixel_std or ()):
        raise ConfigError("model.pixel_mean and model.pixel_std must have the same number of values.")
    if pretrained is not None and not pretrained.startswith(RUN) and model.stem == AUTO:
        updates["stem"] = "imagenet"  # published weights were trained with it, however small the images are
    return model.model_copy(update=updates)


def _check_names(experiment: Experiment, has_features: bool) -> None:
    for kind, key, name in (
        ("backbone", "model.backbone", experiment.model.backbone),
        ("partition", "partition.kind", experiment.partition.kind),
        ("annotation", "annotation.kind", experiment.annotation.kind),
        ("loss", "training.loss", experiment.training.loss.partition(":")[0]),  # options follow the colon
        ("augmentation", "training.augment", experiment.training.augment),
    ):
        try:
            if (key, name) != ("partition.kind", AUTO) and not name.startswith(registry.OBJECT_PREFIX):
                registry.find(kind, name)  # the data decides on "auto"; an object is looked up when it is needed
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
    backbone = experiment.model.backbone
    own = backbone.startswith(registry.OBJECT_PREFIX) or backbone in registry.find_added("backbone")
    source = experiment.data.source
    missing_object = source.startswith(registry.OBJECT_PREFIX) and source not in registry.all_of("source")
    if (backbone == "mlp") != has_features and not own and not missing_object:
        raise ConfigError(
            f"model.backbone = '{backbone}' does not fit data.name = '{experiment.data.label}': mlp is for feature "
            "vectors (features:FILE.npz), the other backbones are for images."
        )


def _check_none(options: dict[str, Any], stored: dict[str, Any]) -> None:
    """TOML has no None: an option that is None must be None by default too, or a stored experiment differs."""
    defaults = flatten(stored)
    for name, value in flatten(options).items():
        if value is None and defaults.get(name) is not None:
            raise ConfigError(
                f"method.{name} = None cannot be stored in an experiment file, which would mean its default "
                f"{defaults[name]!r}. Set another value."
            )


def _check_participation(experiment: Experiment, may_be_natural: bool) -> None:
    clients, count = experiment.partition.clients, experiment.participation.count
    if clients is None and experiment.partition.kind == AUTO and not may_be_natural:
        clients = DEFAULT_CLIENTS
    if clients and count and count > clients:
        raise ConfigError(
            f"participation.count = {count} is more than partition.clients = {clients}; lower it, or leave it "
            "out for all clients."
        )


def _check_views(experiment: Experiment, has_images: bool) -> None:
    """With a frozen backbone, augmentation happens when its features are stored: once per view."""
    views, augmentation = experiment.model.views, experiment.training.augment
    if experiment.model.freeze != "backbone" or not has_images:
        if views > 1:
            raise ConfigError(f"model.views = {views} is for images and model.freeze = 'backbone'; leave it out.")
    elif (augmentation != "none") != (views > 1):
        raise ConfigError(
            "With model.freeze = 'backbone' images are augmented before their features are stored: training.augment = "
            f"'{augmentation}' and model.views = {views} do not fit together. Set both (model.views = 4, "
            "training.augment = 'crop-flip'), or neither."
        )
