"""Using trained models: finished runs, model files, prediction, thresholds and export.

- `load_run`: `load_run`, a finished run with its numbers and its model; start here
- `model_file`: `load_model` and `SavedModel`, a model as one file that predicts
- `model_metadata`: what a model file may say about its model; it is validated, because a file can come from anybody
- `image_predictions`: image files in, tables of predictions out
- `tune_thresholds`: thresholds and calibration, chosen again on validation data
- `export`, `model_card`: ONNX, torch.export or safetensors with a model card
- `preprocess`: copied beside exported models; reads images without fedmll
"""
