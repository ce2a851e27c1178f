"""The asynchronous shell: endpoint, links, serving, downloading, job roots, resources."""
