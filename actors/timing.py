"""Every timeout, lease and period of the product, in seconds, grouped by mechanism.

Eight mechanisms notice that a process has died, hangs or is unwanted:

    ingress ----- 7 heartbeat -----> scheduler ----- 1 step limit ------> runner
       ^                             |  ^  ^  |                           ^  |
       +-------- 8 client lease -----+  |  |  +----- 2 ping --------------+  |
                                        |  +-------- 3 runner lease ---------+
                                        |
    supervisor -- 4 pulse --------------+-- 5 claim, by another supervisor
       ^                                |
       +----------- 6 supervisor lease -+

      who watches whom           what it notices              after           what it does
    1 scheduler, a busy runner   a step over its limit        5 s or more     kills it, recomputes
    7 ingress, the scheduler     no message, no heartbeat     4 s             replays elsewhere
    5 new supervisor, the old    no pulse                     5 s             claims the engine
    2 scheduler, an idle runner  no answer to a ping          10 s            kills it
    8 scheduler, a client        lease not renewed            15 s            aborts its requests
    4 supervisor, the scheduler  3 pulses missed              18 s            replaces it
                                 its loop does not turn       20 s            replaces it
    3 runner, any scheduler      no step, no ping             20 s            exits
    6 scheduler, any supervisor  no pulse                     60 s            stops runners, exits

A process that dies, or that a signal has stopped, is noticed at once: Ray or /proc reports it. The
table is for processes that hang and for networks that are cut.

The order matters. Clients leave a hung scheduler (7) long before it is replaced (4), so that their
streams go on elsewhere. It is replaced before its runners exit (4 < 3), so that the next scheduler
adopts them with their weights. On a busy machine a replacement takes long, so the supervisor renews
their lease meanwhile. Serve replaces a hung supervisor before its engine leaves (< 6).
Each lease is several times the period that renews it, so that one lost message ends nothing.
``tests/actors/test_timing.py`` asserts all of this.
"""

# 1. The limit of a step (scheduler/faults/watchdog.py). The first steps of new runners compile
# kernels, capture graphs and touch memory. Their successors' limit follows from that.

MIN_STEP_LIMIT_SECONDS = 5.0
FIRST_STEPS_LIMIT_SECONDS = 120.0
LATER_FIRST_STEPS_LIMIT_SECONDS = 15.0
FIRST_RESTART_PAUSE_SECONDS = 0.5  # doubles with each restart that fails ...
MAX_RESTART_PAUSE_SECONDS = 30.0  # ... up to this

# A step whose call was lost is sent again for this long, then its runner is replaced.
STEP_RESEND_SECONDS = 1.0
STEP_RESEND_PAUSE_SECONDS = 0.02

# Two threads of a runner with a GPU take steps, so that one may begin before the one before it.
# Then it waits so long, and is refused.
STEP_OVERTAKEN_SECONDS = 0.1

# Finding the tokens that a row's grammar allows: time beyond this, and beyond two forwards, is
# overtime, and a request fails when its masks have had too much of it. So a hiccup fails no
# request, and a hostile grammar holds up its neighbours for a second. Processor time, as others
# may be busy. The runner refuses the grammar to new requests for a while.
MASK_SECONDS = 0.05
MASK_OVERTIME_SECONDS = 1.0
GRAMMAR_BARRED_SECONDS = 600.0

# A runner's table of step times: how long its measurement may take at the start where a setting
# names a method of speculation, and where none does. Speculation that has cost more than it gave in
# a window pauses; the pause doubles each time, up to the last.
STEP_COST_SECONDS = 1.0
SKETCH_SECONDS = 0.2
DRAFT_WINDOW_SECONDS = 2.0
DRAFT_PAUSE_SECONDS = 10.0
MAX_DRAFT_PAUSE_SECONDS = 40.0

# Between two lines about a GGUF file that becomes a folder.
GGUF_PROGRESS_SECONDS = 2.0

# How long a call of decode steps takes where model and scheduler share a process on a CPU. What is
# computed past a stop string is lost.
OFFLINE_LEASE_SECONDS = 0.03

# Grammars that are compiled ahead: if no runner has answered for this long, the oldest request runs
# without, and the step compiles. Meanwhile an idle scheduler looks at its deadlines so often.
PREPARE_SECONDS = 10.0
LOBBY_TICK_SECONDS = 0.05

# Pages of a disk (--kv-disk-path): a request waits for them so long at most, and no more are asked
# for than should come in that time. A runner looks so often whether the steps before have run.
PAGE_READ_SECONDS = 2.0
PAGE_TURN_SECONDS = 0.001
HOST_FIRST_BYTE_SECONDS = 0.002  # of pages in host memory: a call, and the end of a step
PEER_FIRST_BYTE_SECONDS = 0.02  # of another engine, which the first time is looked up by name
MOVE_COMPUTED_SECONDS = 0.25  # to compute what a stream lacks that moves without its pages
PEER_READ_SECONDS = 10.0  # that a prompt waits for pages of another engine, at most
PEER_SILENCE_SECONDS = 5.0  # for which an engine is left alone that has given none, doubling ...
MAX_PEER_SILENCE_SECONDS = 60.0  # ... to this
PEER_REST_SECONDS = 60.0  # after which an engine closes a connection that nothing was asked by
WRONG_PAGES_SECONDS = 60.0  # within which three wrong pages bar an engine ...
PEER_BARRED_SECONDS = 600.0  # ... for so long
SENT_SECONDS = 5.0  # for which a router takes it that pages are where it has sent their tokens
SLOW_READ_SECONDS = 0.5  # a read that takes longer says how fast its source is, however small
SPEED_FADES_SECONDS = 60.0  # what was seen of a source's speed
PAGE_WARNING_SECONDS = 60.0  # between two lines about a disk that takes nothing

# Sessions: the first parked request takes seats at their pauses after the first of these, and all
# that it needs where nothing has run for the second, which no engine is to seem stalled for. The
# pages of running requests are a mean over the third; who has paused for the fourth is forgotten. A
# ranking of paused sessions takes some 3 microseconds for each, and is kept so long for each.
PARKED_SECONDS = 300.0
PARKED_IDLE_SECONDS = 20.0
PAGES_HELD_SECONDS = 60.0
FORGOTTEN_SESSION_SECONDS = 3600.0
RANKED_SECONDS = 2e-3

# `rayfin bench agents --kill` waits so long for an engine that starts again, looks so often, and
# asks a scheduler for its runners for so long.
VICTIM_SECONDS = 60.0
VICTIM_POLL_SECONDS = 0.5
VICTIM_ANSWER_SECONDS = 10.0

# Events of pages (--kv-events-config) begin again so long after an engine's start, for readers that
# had fewer of the one before it; and their thread looks so often for readers that ask.
KV_EVENTS_AGAIN_SECONDS = 60.0
KV_EVENTS_POLL_SECONDS = 0.05

# One that has had the first of processor time, or has run for the second, compiles while the
# processor is idle. Whenever the third has passed and it has had little time, it begins again with
# a share of the processor. While a thread that was left behind still waits for time, the fourth at
# most, long ones keep their share. After the last one begins again unless it has had much time.
COMPILE_SHORT_SECONDS = 0.02
COMPILE_SHORT_MOST_SECONDS = 0.2
COMPILE_STARVED_SECONDS = 0.5
COMPILE_FULL_SECONDS = 30.0
COMPILE_LATE_SECONDS = 2.0

# A step that runs is waited for so long before its profile ends amid it.
PROFILE_STEP_SECONDS = 5.0

# The content of an adapter on its way from the actor that holds it to a runner.
# Where that actor is missing, a runner asks again after the pause.
ADAPTER_FETCH_SECONDS = 8.0
ADAPTER_FETCH_PAUSE_SECONDS = 0.25
# An ingress asks the registry of adapters for changes, which answers a change at once, else after
# ADAPTER_POLL_SECONDS. A name that their folder does not have is looked for again after the retry
# time. A registry that no ingress asks exits.
ADAPTER_POLL_SECONDS = 5.0
ADAPTER_RETRY_SECONDS = 60.0
ADAPTER_LIST_SECONDS = 10.0  # age of the names that /v1/models shows of that folder
ADAPTER_REGISTRY_CALL_SECONDS = 60.0
ADAPTER_REGISTRY_LEASE_SECONDS = 60.0
ADAPTER_READ_SECONDS = 1800.0  # an adapter may come from Hugging Face
BUCKET_READER_LEASE_SECONDS = 300.0  # of who reads a bucket for all nodes, after the last question

# A rank waits this long for a peer within a step. The scheduler's limit is shorter: this one is for
# ranks that have lost their scheduler as well.
PEER_STEP_SECONDS = 180.0

# 2. and 3. Idle runners: pings (scheduler/faults/runner_pinger.py), and the lease that they renew.

RUNNER_PING_SECONDS = 2.0
PING_PATIENCE_SECONDS = 10.0
RUNNER_LEASE_SECONDS = 20.0

# Starting, adopting and ending processes.

WAIT_SLICE_SECONDS = 1.0  # one turn of waiting for runners; the loop ticks in between
MODEL_LOAD_SECONDS = 1800.0  # a model that loads, or a node that the cluster has yet to start
LOAD_LOG_SECONDS = 5.0  # a line about a load that goes on
RUNNER_PROCESS_SECONDS = 60.0  # a replacement's process; on a full disk Ray may report no failure
RUNNER_ADOPTION_SECONDS = 15.0  # a runner finishes its last step before it is adopted
ACCEPT_PAUSE_SECONDS = 0.1  # after a connection that a process could not take
TOKEN_SECONDS = 10.0  # for who connects to a socket of this machine to show its token
FORK_ANSWER_SECONDS = 20.0  # a worker that is not forked in this time starts by itself
PROCESS_KILL_SECONDS = 10.0  # from SIGKILL until the process is gone
PROCESS_POLL_SECONDS = 0.02
PROCESS_GONE_SECONDS = 20.0  # the same on another node, and until Ray frees an actor's name
NAME_POLL_SECONDS = 0.05
LIFELINE_POLL_SECONDS = 0.5  # how often a process looks at its own lease

# Spare runners (scheduler/faults/spare_runners.py). One is made when the runner has served for a
# while, so that it takes nothing from a start. One that does not say who it is in time, or imports
# for ever, is ended.

SPARE_TURN_SECONDS = 1.0  # between looks at them
SPARE_CALM_SECONDS = 3.0
SPARE_AFTER_CLAIM_SECONDS = 10.0  # an engine that started ahead has its supervisor; Serve starts
SPARE_ANSWER_SECONDS = 5.0
SPARE_WARM_SECONDS = 600.0

# A folder of packed weights (--weights-cache). An unfinished file of this age was left by a process
# that has died. One that has just changed may change again within the same tick of its clock.
UNFINISHED_FILE_SECONDS = 3600.0
FILE_SETTLED_SECONDS = 2.0

# A signal that repeats the first within this time is one with it (deployments/serve/serving.py).
SIGNAL_REPEATS = 1.0

# 4. A supervisor's pulse (supervision/). A scheduler is hung when it has missed so many pulses in a
# row, or when its loop has not turned for so long; the loop turns while it waits for runners.

PULSE_SECONDS = 1.0
PULSE_ANSWER_SECONDS = 5.0
MISSED_PULSES = 3
LOOP_STUCK_SECONDS = 20.0
ROOM_SECONDS = 30.0  # before the log says what an engine that is to start waits for
MAX_REPAIR_PAUSE_SECONDS = 30.0  # the pause after a failed repair doubles up to this

# An engine has stalled when it has work and finished no step for this long, or for so many steps.
ENGINE_STALL_SECONDS = 60.0
ENGINE_STALL_STEPS = 100

# Serve's own check of a supervisor's replica.
SERVE_HEALTH_PERIOD_SECONDS = 2.0
SERVE_HEALTH_TIMEOUT_SECONDS = 10.0

# 5. and 6. A scheduler without a pulse may be claimed by another supervisor, and then leaves.

SUPERVISOR_CLAIM_SECONDS = 5.0
SUPERVISOR_LEASE_SECONDS = 60.0

# 7. An ingress' connection to an engine (deployments/client/).

HEARTBEAT_SECONDS = 1.0
SILENCE_TICK_SECONDS = 0.5  # how often silence is measured
ENGINE_SILENT_SECONDS = 4.0
RECONNECT_SECONDS = 0.05  # doubles with each refusal, of an engine that starts, ...
MAX_RECONNECT_SECONDS = 0.25  # ... up to this
LINK_DRAIN_SECONDS = 0.5  # for what an engine has written before Ray says that it has gone
LINK_WELCOME_SECONDS = 1.0  # for an engine to take a client's socket; else Ray carries messages
REGISTRY_REFRESH_SECONDS = 2.0  # between looks for engines ...
REGISTRY_SEARCH_SECONDS = 0.1  # ... and while there is none
APPLICATION_END_SECONDS = 1.0  # between questions whether there will be one again
REPLAY_PAUSE_SECONDS = (0.1, 2.0)  # first and longest pause of a replay that a full queue refuses
WAITING_ROOM_PAUSE_SECONDS = 1.0  # between two waiting calls

# 8. A client's lease on an engine. A thread renews it while the event loop is busy, but not for
# an event loop that is stuck.

LEASE_RENEWAL_SECONDS = 4.0
CLIENT_LEASE_SECONDS = 15.0
CLIENT_STUCK_SECONDS = 60.0

# What is kept of requests: the tokens of one that has ended, for clients that resume its stream,
# and the digest of a prompt that killed runners.
TOKEN_LOG_SECONDS = 60.0
BLOCKED_PROMPT_SECONDS = 600.0

# Calls to an engine: how long they wait in the scheduler, and how long the caller waits. A command
# may allocate the memory of all pages.

LOOP_ANSWER_SECONDS = 5.0
CLIENT_ANSWER_SECONDS = 5.0
LOOP_COMMAND_SECONDS = 60.0
CLIENT_COMMAND_SECONDS = 90.0
OPERATION_POLL_SECONDS = 0.5  # of the command line, while an operation runs
STATUS_LINE_SECONDS = 10.0
TOOL_SECONDS = 10.0  # a tool that collect-env asks, such as nvidia-smi

# Leaving. An engine that an update replaces by another model's takes requests until Serve has
# replaced the ingresses as well (handover), which start behind the new engine. Then the proxies
# hear of the new ones. After the drain its requests are moved, and clients read the rest. An
# ingress stays until its streams have ended, because a connection cannot be handed over.

HANDOVER_SECONDS = 120.0  # at most
HANDOVER_POLL_SECONDS = 0.5
HANDOVER_SETTLE_SECONDS = 3.0
DRAIN_POLL_SECONDS = 0.1
EVICTION_SECONDS = 3.0
CLIENT_LEAVE_SECONDS = 10.0
ENGINE_STOP_SECONDS = 20.0  # all that follows the drain
INGRESS_DRAIN_SECONDS = 3600.0
CERTIFICATE_CHECK_SECONDS = 2.0  # between looks at a certificate's file
ADMIN_BIND_SECONDS = 20.0  # an update's new admin port waits for the old one ...
ADMIN_BIND_PAUSE_SECONDS = 1.0
ADMIN_STOP_SECONDS = 5.0  # ... which ends in this time
UPSCALE_SECONDS = 10.0  # more engines must be wanted for this long: a model takes time to load

# The metrics hub: ingresses report to it, and it pulls from schedulers. A scrape waits a moment for
# new numbers, then gets the last ones.

HUB_REPORT_SECONDS = 2.0
HUB_REPORT_ANSWER_SECONDS = 3.0
HUB_PULL_SECONDS = 2.0
HUB_PULL_ANSWER_SECONDS = 1.0
HUB_SCRAPE_SECONDS = 0.03
INGRESS_SCRAPE_SECONDS = 0.25
HUB_SILENT_SECONDS = 10.0  # gauges of a silent ingress or engine are dropped
HUB_LEASE_SECONDS = 15.0
HUB_IDLE_SECONDS = 30.0  # a connection without a request

# The store of responses. An owner that has not asked for orders for so long is gone.

RESPONSE_STORE_POLL_SECONDS = 10.0
RESPONSE_STORE_CALL_SECONDS = 3 * RESPONSE_STORE_POLL_SECONDS
RESPONSE_STORE_RETRY_SECONDS = 1.0
RESPONSE_OWNER_SECONDS = 30.0

# Batches: pauses of a line whose engine is busy or away, answers become durable, and how long
# ``rayfin run-batch`` waits for a server that takes nothing.

BATCH_PAUSE_SECONDS = (0.2, 10.0)  # first and longest
BATCH_RECORD_SECONDS = 1.0
BATCH_SILENCE_SECONDS = 5.0  # it says so after this time
BATCH_PATIENCE_SECONDS = 600.0
BATCH_REPORT_SECONDS = 30.0  # between two lines of progress where there is no terminal
THREAD_SWITCH_SECONDS = 0.001  # an engine's thread waits so long for the interpreter, not for 5 ms
BACKGROUND_REST_SECONDS = 60.0  # background requests that rest so long give their pages back
BACKGROUND_STEP_SECONDS = 0.2  # a request that arrives waits for a step of background requests
BATCH_POLL_SECONDS = 0.5  # the worker looks for new and cancelled batches
BATCH_RETRY_SECONDS = 10.0  # a batch whose folder cannot be written waits
BATCH_SWEEP_SECONDS = 600.0  # between removals of what is past its time

# HTTP clients: until headers and body are there, until ``100 Continue`` is sent in any case, and
# how long a client may read nothing, or send after a refusal.

HEADER_SECONDS = 10.0
BODY_SECONDS = 30.0
RECORDING_SECONDS = 300.0  # of audio that is to be written down
UPLOAD_SECONDS = 1800.0  # of a file for batches
UPLOAD_STALE_SECONDS = 24 * 3600.0  # then what an upload that broke off has left is removed
CONTINUE_SECONDS = 1.0
SHORT_BODY_SECONDS = 0.005  # after the first lines, until a short body travels without them
LANE_WELCOME_SECONDS = 1.0  # for a proxy to take a replica's lane; else Serve carries the answer
STALLED_SECONDS = 30.0
SLOW_READER_SECONDS = 0.5  # a message took longer than this: report the bytes read at once
LINGER_SECONDS = 2.0
SSE_COMMENT_SECONDS = 10.0  # proxies close connections that are silent for longer
HUB_SECONDS = 20.0  # of refused connections to the Hugging Face hub before a start is given up
HUB_TERMINAL_SECONDS = 5.0  # the same where somebody waits for it
HUB_PAUSE_SECONDS = 1.0  # between two tries
HUB_TRY_SECONDS = 10.0  # for one to be answered
START_POLL_SECONDS = 0.1  # between looks whether Serve takes applications
START_SHOWN_SECONDS = 0.25  # between two pictures of a start that a terminal shows
START_TOLD_SECONDS = 5.0  # for an engine that has just started to say its limits
RETRY_AFTER_SECONDS = 1  # the Retry-After header, if no better value is known

PIXELS_SECONDS = 10.0  # for an image's arrays to come from the object store of another node

# Chat templates: processor time, and the part of it that the event loop may spend itself.

TEMPLATE_SECONDS = 2.0
INLINE_TEMPLATE_SECONDS = 0.1

# Grammars: what the process that checks them allows (deployments/guidance/grammar_check.py). A
# child that has said nothing for so long is killed. On a busy machine one that has not computed
# yet for GRAMMAR_CHECK_CPU_SECONDS gets more time, because its grammar is not to blame. It has a
# share of the processor for GRAMMAR_SHORT_SECONDS of processor time, which suffice for nearly all,
# or for GRAMMAR_SHORT_MOST_SECONDS. Then it computes while the processor is idle, until after
# GRAMMAR_IDLE_SECONDS another child begins the check again with a share.

GRAMMAR_CHECK_SECONDS = 2.0
GRAMMAR_CHECK_CPU_SECONDS = 0.25
GRAMMAR_SHORT_SECONDS = 0.06
GRAMMAR_SHORT_MOST_SECONDS = 1.5
GRAMMAR_IDLE_SECONDS = 0.5
GRAMMAR_STARVED_SECONDS = 8.0
GRAMMAR_CPU_LIMIT_SECONDS = 3
GRAMMAR_MASK_SECONDS = 0.25  # processor time of one mask
GRAMMAR_QUICK_SECONDS = 0.005  # of one that compiles within a step, beside its forward
CHECKER_SPARE_SECONDS = 2.0  # a child that has answered waits for the next grammar
CHECKER_REAP_SECONDS = 0.05  # it looks for ended children, while a grammar waits for their end
CHECKER_TICK_SECONDS = 0.5  # the helper says that it lives, while it has work
CHECKER_SILENT_SECONDS = 3.0  # then it is replaced
CHECKER_START_SECONDS = 60.0  # the vocabulary of a large tokenizer takes seconds
CHECKER_RESTART_PAUSE_SECONDS = 0.5  # after a helper that did not start

# New weights (weights/coordinator.py). A paused engine that no coordinator has asked for in a third
# of this has one started; after all of it, it goes on, or hands its requests back. An engine that
# does not answer for so long is left out of an update.
WEIGHTS_SILENT_SECONDS = 30.0
WEIGHTS_POLL_SECONDS = 0.02
WEIGHTS_BUCKET_SECONDS = 60.0  # in which a tensor of a trainer's group has to come
WEIGHTS_ALIVE_SECONDS = 2.0  # between two words to engines that are paused
WEIGHTS_LEAVE_SECONDS = 3.0  # in which requests take their pages along to another engine
WEIGHTS_PAUSE_SECONDS = 600.0  # of a pause by hand; then engines are resumed
WEIGHTS_ABANDONED_SECONDS = 600.0  # versions that no engine serves from are of an earlier server
WEIGHTS_CALL_SECONDS = 3600.0  # of a whole update, in which requests may have to finish
WEIGHTS_UNUSED_SECONDS = 60.0  # a coordinator that finds no engine for so long exits
