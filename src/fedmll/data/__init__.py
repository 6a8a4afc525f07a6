"""Data: from files to a federation of clients. Start with `federation.build`.

- `dataset` — `Dataset` and `Splits`: samples, three-valued targets (1 present, 0 absent, -1 unknown), class names
- `sources/` — one module per dataset or file format; `sources.load(name)`, published sample counts, downloads
- `objects` — data given as arrays, data frames, torch and Hugging Face datasets
- `images/` — decoding, cache, augmentation, labels files
- `targets` — targets of sources, random splits
- `composite` — multi-label images made of single-label images
- `sites` — data of several sources with different label sets (`[[sites]]`); `joined_store`: their samples as one array
- `partition` — which client gets which samples; `sample_assignment` (its algorithm), `partition_file`
- `annotation` — which client annotates which classes
- `participation` — which clients take part in a round
- `federation` — `Federation`: all of the above for one experiment
- `fingerprint` — recognise the data of an earlier run
"""
