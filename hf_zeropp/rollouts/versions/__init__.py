"""Weights for inference servers elsewhere: each version as the words that changed since the one before, without loss.

An optimizer step changes the bits of few 16-bit weights (about 7 % at a learning rate of 1e-5), so sending those alone takes a
small part of a whole copy. The trainer writes versions to a folder, and servers read it, directly or over HTTP:

    sender = UpdateSender("updates")                       # on all ranks
    sender.publish(publish_weights(model))                 # after some steps, on all ranks

    receiver = UpdateReceiver("https://trainer/updates")   # on a server: the folder, behind any server of static files
    if receiver.update():                                  # between two requests
        engine.load_weights(receiver.weights.items())

Reading order: ``log.py`` (the files of a version, and which of them a receiver needs), ``sender.py``, ``receiver.py``,
``source.py``.
"""

from hf_zeropp.rollouts.versions.receiver import UpdateReceiver
from hf_zeropp.rollouts.versions.sender import UpdateSender

__all__ = ["UpdateReceiver", "UpdateSender"]
