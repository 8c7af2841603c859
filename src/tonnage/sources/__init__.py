"""Where a checkpoint lies: a directory, the hub, a web server, an object store; one interface over all of them.

``addresses.open_source`` takes what a user types. ``model`` is the interface, ``local`` the only kind that planning on
this machine imports; the others bring their client libraries when they are opened.
"""
