"""Networks. Start with `network.Network`: a backbone and a head.

- `backbones/` — convolutional (ConvNet, ResNet, DenseNet, MobileNet), vit, mlp; `backbones.base` builds them
- `network` — `Network`, the linear `Classifier`, and one with lifted features
- `products` — a linear classifier on products of features
- `class_attention`, `ctran` — other heads
- `flat_weights` — a model's weights as one vector
- `objects` — a backbone given as a torch module
- `frozen_features` — stored outputs of a frozen backbone
- `pretrained_weights` — initial weights
- `label_embeddings` — text encoders, and embeddings of class names
"""
