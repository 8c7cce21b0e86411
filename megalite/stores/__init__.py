"""Object stores: runs and tokens under a URL such as `s3://bucket/run`, by fsspec (extra `cloud`).

    url.py       StoreUrl, a place in a store, with the few methods of a path that readers use
    store.py     Store: names, read, size, put, create, swap, delete; our own retries, counted. What fsspec serves
                 (memory, Google's), in whole objects
    s3.py        ... of S3 and what speaks its language: parts, conditions by ETag
    ahead.py     ranges of an object, merged and read several at a time before they are asked for

An object is written whole or not at all, and there is no rename. So what must appear at once is one small object, made
by a conditional write: `create` succeeds for one writer, `swap` for the one that saw the newest version. An answer can
be lost, and a repeated request is then refused because the first one has succeeded: whoever is refused reads the object
back, and it was its own if the content is.

A store is opened in the process that uses it, never before a fork. Proved by
tests/unit/stores in memory, and by tests/faults/test_store_faults.py against a server of S3's protocol behind a proxy
that fails on purpose.
"""

from megalite.stores.ahead import RangesAhead
from megalite.stores.store import REREADS, Missing, Store, StoreError, Tagged
from megalite.stores.url import Place, StoreUrl, close_stores, place, run_place
