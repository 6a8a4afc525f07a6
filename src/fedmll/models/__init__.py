"""Networks. Start with `network.Network`: a backbone and a head.

- `backbones/` — convnet, resnet, densenet, mobilenet, vit, mlp; `backbones.base` builds them
- `network` — `Network` and the linear `Classifier`
- `class_attention`, `ctran`, `lifted_features` — other heads
- `flat_weights` — a model's weights as one vector
- `frozen_features` — stored outputs of a frozen backbone
- `pretrained_weights` — initial weights
- `text_encoders`, `label_embeddings` — embeddings of class names
"""
