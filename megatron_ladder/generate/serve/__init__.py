"""An OpenAI-compatible server that shares one batch among all requests: `--serve`.

    clients <-HTTP-> app, a thread of rank 0 <-tickets, tokens-> scheduler, rank 0 -step plans-> batch, every rank
                               |
                         prompt process

A request takes these steps:

    connection       limits clients and the time that they take
    app              receives it, checks limits, collects its tokens, and writes the response
    protocol         parses it
    prompt_process   renders its chat template, and encodes its prompts
    scheduler        assigns samples to slots as they become free, and broadcasts each step to all ranks, which run it
    responses        builds the JSON of the response
"""
