"""The HTTP front: routes, bodies, schemas and error answers. Nothing below knows HTTP or OpenAI's spelling."""
