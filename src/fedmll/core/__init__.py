"""What every other package builds on; nothing here imports data, models or methods.

- `errors` — exceptions with messages for people
- `text` — text from other machines, made safe to print; suggestions for misspelt names; yes/no questions
- `files` — atomic writes, file locks, full disks
- `message` — `Message`: named tensors and named numbers; `DiskBuffer`: messages that are read twice
- `tensor_files` — safetensors files with checksums
- `registry` — names of methods, losses, data sources, … and plug-ins
- `seeding` — random generators derived from (seed, purpose, …)
- `small_groups` — which counts and sums may leave a client
- `processes` — worker processes and the number of threads
- `download` — fetch a published file and check its hash
- `addresses` — HOST:PORT addresses
- `versions` — installed versions of fedmll and other packages
"""
