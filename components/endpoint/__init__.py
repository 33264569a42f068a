"""A client for OpenAI-compatible chat endpoints that caches answers and never asks a question twice.

| File | Contents |
|---|---|
| `client.py` | sends questions concurrently and returns an answer to each |
| `answers.py` | the cache of answers, in a file |
| `servers.py` | the identity of a server, from its list of models; a cached answer belongs to one server |
| `questions.py` | a question and the images in it |
| `replies.py` | reads the reply of a server |
| `transport.py` | the HTTP client: time limits, no redirects |
| `silence.py` | ends a run if the server hangs |
| `url.py` | checks and normalises URLs of endpoints |
"""
