"""Image files: reading, preparing and augmenting them.

- `labels_csv` — the labels file of an image folder
- `decode` — image files to one uint8 array; `dicom` for DICOM files, `lazy_images` for images decoded on demand
- `cache` — prepared images on disk
- `augmentation` — random augmentation of batches
- `pack` — an image folder as one file
- `unlabelled_folder` — images without labels
- `problems` — all problems of a user's files in one error
"""
