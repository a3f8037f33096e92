-- Names of the fields in the hashes of runs, tasks and instances, and the letters and words in their values. Files
-- write a field by its name here, unless the stored name is a plain word such as `status`. Stored names and values
-- never change: other releases read them. `bus/library.py` puts the values in place, so these tables do not exist when
-- a function runs.
--
-- `base` is `<namespace>:{<partition>}:`, the first and only declared key of every function: all keys of a partition
-- share its slot. Run ids are paths: `r` is a task's first run, and `r/2.0.1` is the run that step `2.0.1` of `r`
-- started.

-- A run: `run:<task>/<run>`. The first run's fields are in the task's own hash, `task:<task>`.
local RUN = {
  current = 'cur',          -- entry id in flight, or where the run waits: `held` for its steps, `mail` in a mailbox,
                            -- `nest` for the holder of its instance to wait, `retry` (or for a turn, see turns.lua),
                            -- `pend` for a nested run to end, `park` after it diverged, `queue` for its tenant's turn
                            -- (queues.lua), `slot` for a slot of a limit (slots.lua)
  header = 'h',             -- one value a line: see `header_of`
  input = 'd',              -- JSON
  context = 'x',            -- JSON that travels with every event
  turn = 'u',               -- turns committed, and changes of the instance's state by nested runs
  missing = 'm:',           -- + step: a step without a result, as digest (8), KIND (1) and WAKES
  result = 'j:',            -- + step: its result, as digest (8), RESULT (1), time in ms (13) and JSON
  emitted = 'e:',           -- + branch: how far its output is, as `attempt count recorded checksum ms`: of `count` pieces
                            -- the rows of the first `recorded` are committed
  output_attempt = 'ea',    -- how often its output has begun, from 1
  attempts = 'b:',          -- + step: how often a model call without a result was begun
  question = 'q:',          -- + step: when it was asked (13 digits, ms) and its event's data
  receives = 'n:',          -- + step: when it began to wait for a message (13 digits, ms) and the message's name
  request = 'r:',           -- + step: an open request to another partition, packed (requests.lua)
  answered_by = 'l:',       -- + step: traceparent of the span that gave the step its result
  override = 'ov',          -- the instance's state after a nested run, not yet tied to a step
  override_from = 'o:',     -- + step: the same, valid from this step on: the number of the change, a space, the state
  after_change = 'p:',      -- + step: the code sees this result after the change with this number
  last_change = 'oc',       -- the number of the last change that is tied to a step
  unseen = 'un',            -- steps whose results came while it is at `pend`, one per line
  state_at_start = 's0',    -- of a nested run, and of one that has given up its key: the instance's state when it began
  unrecorded = 'w',         -- steps journaled in mid-turn whose rows no commit has recorded, one per line: step, kind,
                            -- name and usage (JSON), separated by tabs; for output the first step of a branch that
                            -- has emitted, `emit`, and `@` with the branch
  turn_owner = 'by',        -- entry and owner of the turn in which a process does steps by itself
  asks_in_turn = 'a',       -- set once the run has asked in mid-turn: its turn stays in flight while it waits
  cleared_by_waits = 'cw',  -- how often it was delivered again and then waited for an answer
  open_asks = 'ao',         -- how many requests of its turn have no answer yet
  released = 'ks',          -- whether it holds its key again: see `KEY.give`
  held_back = 'y',          -- answers that wait for the end of a nested run on its instance, packed: step, status,
                            -- ms, JSON
}
-- A run also has `g<n>`: how many steps of a group still lack a result.

-- A task's own fields, in addition to those of its first run, `status` and `steps`.
local TASK = {
  flags = 'fl',             -- FLAG letters
  child = 'k:',             -- + run: a child run; the value is its instance, or `@<partition>:<task>`, or empty
  kept_child = 'c:',        -- + run: a child run that failed, or was open when the task ended; the value is the digest
                            -- of the step that requested it. Its journal waits for a reopened run to request it again.
                            -- Of a fork: a child run of the origin, with `*` and its agent as the value
  timer = 'z:',             -- + member of `timers`; the value is when it was asked for
  usage = 'us',             -- what the task has used: JSON, names to numbers
  limits = 'lim',           -- the most it may use: JSON
  reserved = 'rs',          -- reservations of running model calls: JSON, `<run>|<step>` to names and amounts
  output_bytes = 'ob',      -- how much the task has written to its output
  letters = 'lt',           -- number of its dead letters, which pin the ended task
  own_row = 'row',          -- of an ended task with a dead letter: 1 if `steps` counts the row of its first run
  inbox = 'i:',             -- + name: messages that no run has received, the oldest first, packed
  inbox_size = 'ib',        -- their number and bytes under all names
  receivers = 'v:',         -- + name: runs and steps that wait for such a message, in turn, packed
  final = 'out',            -- the final event's data
  version = 'av',           -- the app's version whose process committed its first turn, if that waits
  withdrawn = 'wd',         -- set once nobody wants the task's answer
}

-- Things that a task's end has to clean up or report.
local FLAG = {
  output = 'o',             -- it has an output stream
  steps_shown = 'r',        -- its steps are shown on that stream
  children = 'c',           -- it has had child runs
  timers = 'z',
  letters = 'l',            -- a dead letter pins it
  usage = 'u',              -- it has usage or limits
  reserved = 'v',           -- model calls have reserved
  watched = 'n',            -- somebody waits for its runs
  traced = 't',             -- its context names a trace
  reopened = 'e',           -- it has ended before
  inherited = 'i',          -- a fork that has journals of its origin's child runs
  slots = 'p',              -- its runs or calls hold slots of limits, or wait for them
}

-- An instance, `inst:<agent>/<key>`: its `state` and these.
local INSTANCE = {
  holders = 'busy',         -- `task|run` of the runs that hold it, one per line, the newest last; `|` alone while its
                            -- mailbox is cleared of ended tasks
  working_state = 'ws',     -- the state in mid-run, for nested runs
}

-- How a step ended.
local RESULT = {ok = 'K', error = 'E'}

-- What gives a step its result.
local KIND = {agent = 'a', tool = 't', ray = 'r', spark = 's', timer = 'i', human = 'h', receive = 'm',
  key = 'k'}

-- How a step's result wakes its run: by itself, not at all, or (followed by a name) by a reply stream, to a turn that
-- continues. `g<n>` wakes it with the last result of that group.
local WAKES = {alone = '!', never = '0', by_reply = '>'}

-- An entry on a work stream, and on the streams `asks` and `undelivered`.
local ENTRY = {
  header = 'h',             -- one value a line: version, event, task, run, name, key, attempt, turn
  data = 'd',
  context = 'x',
  step = 's',               -- the step whose result resumes the run; of a call redriven with new data: its digest
  errors = 'e',             -- of the attempts so far: a JSON array
  bytes_before = 'n',       -- on `undelivered`: how many bytes the stream had taken before this entry, since it began
}

-- An entry on a client's reply stream or on `replies`; of a result to a turn that continues, `task` is `task|run|step`.
local REPLY = {task = 't', data = 'd', trace = 'x', answered_by = 'l', state = 's'}

-- An entry on the record stream. The last one of a task has `ending`: status, agent, steps, created, ended, session,
-- one a line.
local RECORD = {task = 't', rows = 'd', ending = 'e', error = 'f', trace = 'x', reopened = 'g'}

-- About how many entries a client's reply stream, and the stream of state changes, keep.
local KEPT = {replies = '100000', states = '10000'}

-- An entry on the stream of state changes.
local STATE = {name = 'i', status = 's'}
