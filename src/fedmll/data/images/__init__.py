"""Image files: reading, preparing and augmenting them.

- `labels_csv` — the labels file of an image folder
- `open_image` — open an image file, also DICOM
- `decode` — image files to one uint8 array, at once or on demand (`LazyImages`)
- `cache` — prepared images on disk
- `augmentation` — random augmentation of batches
- `problems` — all problems of a user's files in one error
"""
