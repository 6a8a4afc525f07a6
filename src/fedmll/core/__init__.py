"""What every other package builds on; nothing here knows about data, models or methods.

- `errors` — exceptions with messages for people
- `text` — text from other machines, made safe to print; suggestions for misspelt names
- `files` — atomic writes, file locks, full disks
- `message` — `Message`: named tensors and named numbers
- `registry` — names of methods, losses, data sources, … and plug-ins
- `seeding` — random generators derived from (seed, purpose, …)
- `processes` — worker processes and the number of threads
- `download` — fetch a published file and check its hash
- `network` — HOST:PORT addresses
- `versions` — installed versions of fedmll and other packages
"""
