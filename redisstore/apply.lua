-- The three kernels and the batch rule of package algorithms, for Redis: what Decide does there is done here,
-- number for number. A prologue sets `now` (µs): Redis's TIME in production, a given moment in tests.
--
-- KEYS[i]  the counter of the i-th charge
-- ARGV[1]  the distinct limits, 65 bytes each; ARGV[2] the charges: see wire.go
-- returns  33 bytes a charge: status, remaining, retry, next, mark
--
-- Lua's numbers are doubles: whole numbers are exact to 2^53, and floor(a/b) is exact for a < 2^53. Compile keeps
-- products below 2^52. A number that becomes text loses digits above 1e14, so numbers leave this script only through
-- struct.pack and as arguments of redis.call; a test forbids every other way.

local unpack, pack = struct.unpack, struct.pack
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max
local call = redis.call

local EXACT = 4503599627370496 -- 2^52
local NEVER = -1
local PAD = 60000 -- ms that a key outlives its use: a TTL is garbage collection, nothing is decided by it
local FIXED, LOG, SLIDING = 1, 2, 3 -- greater: the meter

-- State. Constant-size kernels: format, T, A, B. Log: format, T, A, S, head, n, then n entries (moment, running sum),
-- those before head dead. A small log is read and written whole; of a large one only what a decision needs.
local FORMAT, STATE, STATE_SIZE = 1, '>BI7I7I7', 22
local HEADER, HEADER_SIZE = '>BI7I7I7I4I4', 30
local ENTRY, ENTRY_SIZE = '>I7I7', 14
local SMALL = 64 -- entries

-- read returns a counter, or false when its state is in a format that this version does not know.
local function read(key, l)
  local c = {key = key, T = 0, A = 0, B = 0}
  if l.algorithm ~= LOG then
    local v = redis.pcall('GET', key)
    if v then
      if type(v) ~= 'string' or #v ~= STATE_SIZE then return false end
      local format
      format, c.T, c.A, c.B = unpack(STATE, v)
      if format ~= FORMAT then return false end
    end
    c.T0, c.A0, c.B0 = c.T, c.A, c.B
    return c
  end
  c.S, c.head, c.n, c.raw = 0, 0, 0, ''
  local v = redis.pcall('GETRANGE', key, 0, HEADER_SIZE + SMALL * ENTRY_SIZE - 1)
  if type(v) ~= 'string' then return false end
  if #v > 0 then
    if #v < HEADER_SIZE then return false end
    local format
    format, c.T, c.A, c.S, c.head, c.n = unpack(HEADER, v)
    if format ~= FORMAT then return false end
    c.raw = c.n <= SMALL and v:sub(HEADER_SIZE + 1)
  end
  return c
end

-- Log entries are counted from 0.

local function entry(c, i)
  if c.raw then return unpack(ENTRY, c.raw, i * ENTRY_SIZE + 1) end
  local from = HEADER_SIZE + i * ENTRY_SIZE
  return unpack(ENTRY, call('GETRANGE', c.key, from, from + ENTRY_SIZE - 1))
end

local function header(c, entries)
  return pack('>BI7I7I7I4I4c0', FORMAT, c.T, c.A, c.S, c.head, c.n, entries)
end

-- grow turns a small log into a large one.
local function grow(c)
  call('SET', c.key, header(c, c.raw))
  c.raw = false
end

-- put replaces everything from entry i by the given entries, n afterwards in all.
local function put(c, i, entries, n)
  if c.raw then
    c.raw = pack('c0c0', c.raw:sub(1, i * ENTRY_SIZE), entries)
  elseif #entries > 0 then
    call('SETRANGE', c.key, HEADER_SIZE + i * ENTRY_SIZE, entries)
  end
  c.n = n
  if c.raw and n > SMALL then grow(c) end
end

-- first is the first live entry whose moment (by sum: whose running sum) is at least bound, or n.
-- It gallops from the oldest, since what is looked for is nearly always there.
local function first(c, bysum, bound)
  local lo, hi, step = c.head, c.head, 1
  while hi < c.n do
    local at, sum = entry(c, hi)
    if (bysum and sum or at) >= bound then break end
    lo, hi, step = hi + 1, hi + step, step * 2
  end
  hi = min(hi, c.n)
  while lo < hi do
    local mid = floor((lo + hi) / 2)
    local at, sum = entry(c, mid)
    if (bysum and sum or at) >= bound then hi = mid else lo = mid + 1 end
  end
  return lo
end

local function expire(c, l)
  if c.head == c.n then return end
  local edge = c.now - l.window
  local dead = first(c, false, edge + 1)
  if dead == c.n then
    c.head, c.n, c.A, c.S, c.raw = 0, 0, 0, 0, ''
  elseif dead > c.head then
    local _, sum = entry(c, dead - 1)
    c.A, c.head = sum, dead
  end
end

-- rebase lets the running sums of a log begin at 0 again, before they leave the exact numbers.
local function rebase(c, from, less)
  local i = from
  while i < c.n do
    local part, last = {}, min(i + 500, c.n)
    for j = i, last - 1 do
      local at, sum = entry(c, j)
      part[#part + 1] = pack(ENTRY, at, sum - less)
    end
    local bytes = table.concat(part)
    if c.raw then
      c.raw = pack('c0c0c0', c.raw:sub(1, i * ENTRY_SIZE), bytes, c.raw:sub(last * ENTRY_SIZE + 1))
    else
      call('SETRANGE', c.key, HEADER_SIZE + i * ENTRY_SIZE, bytes)
    end
    i = last
  end
  c.S, c.changed = c.S - less, true
end

local function append(c, units)
  if c.A >= EXACT / 2 then
    local less = c.A
    rebase(c, c.head, less)
    c.A = 0
  end
  c.S = c.A + min(c.S - c.A + units, EXACT)
  local i = c.n
  if i > c.head and entry(c, i - 1) == c.now then i = i - 1 end
  c.T = c.now
  put(c, i, pack(ENTRY, c.now, c.S), i + 1)
end

-- remove gives units back to the entry of that moment, if it is still there.
local function remove(c, units, mark)
  local i = first(c, false, mark)
  if i == c.n then return end
  local at, sum = entry(c, i)
  if at ~= mark then return end
  local before = c.A
  if i > c.head then
    local _, s = entry(c, i - 1)
    before = s
  end
  units = min(units, sum - before)
  if units <= 0 then return end
  rebase(c, i, units)
  if sum - units > before or i < c.n - 1 then return end -- an empty entry inside counts for nothing
  c.n = i
  if c.raw then c.raw = c.raw:sub(1, i * ENTRY_SIZE) end
end

local function pullBack(c)
  local i = first(c, false, now)
  c.T = now
  if i < c.n then put(c, i, pack(ENTRY, now, c.S), i + 1) end
end

-- The meter.

local function rescale(level, from, to)
  if from <= 0 then return level end
  local rest = level % from
  local units = (level - rest) / from
  if units > floor((EXACT - to) / to) then return EXACT end
  if rest > floor(EXACT / to) then return (units + 1) * to end
  return units * to + ceil(rest * to / from)
end

local function drain(c, l)
  local level = c.A
  if c.B ~= l.den then
    if level > 0 then level = min(rescale(level, c.B, l.den), l.ceiling) end
    c.B = l.den
  end
  -- A moment that another tick stored is rounded up: later means less drained, never credit for nothing.
  local t = ceil(c.T / l.tick) * l.tick
  c.now = max(c.now, t)
  local elapsed = floor((c.now - t) / l.tick)
  if elapsed >= ceil(level / l.num) then
    level = 0
  elseif elapsed > 0 then
    level = level - elapsed * l.num
  end
  c.A = level
  c.T = c.now - c.now % l.tick
end

-- untilTick is the time until so many ticks have begun after the current one.
local function untilTick(c, l, ticks)
  return ticks * l.tick - c.now % l.tick
end

-- The window.

local function roll(c, l)
  local start = c.now - c.now % l.window
  if start == c.T then return end
  if l.algorithm == SLIDING and start == c.T + l.window then c.B = c.A else c.B = 0 end
  c.T, c.A = start, 0
end

local function left(c, l)
  return l.ticks - floor((c.now - c.T) / l.tick)
end

local function slidingWait(c, l, cost)
  local exact = floor(EXACT / l.ticks)
  local prev, cur, rest = min(c.B, exact), min(c.A, exact), left(c, l)
  local room = l.quota - cur - cost
  if room >= 0 then
    if prev * rest <= room * l.ticks then return 0 end
    return untilTick(c, l, rest - floor(room * l.ticks / prev))
  end
  return untilTick(c, l, rest + l.ticks - floor((l.quota - cost) * l.ticks / cur))
end

-- What the kernels have in common.

local function anchor(c, l)
  c.changed = true
  if l.algorithm > SLIDING then
    c.T = now - now % l.tick
  elseif l.algorithm == LOG then
    pullBack(c)
  else
    c.T = now - now % l.window
  end
end

-- open brings a counter to the moment that counts. The log and the window open alike for every limit
-- of theirs, so what one batch opened the next may use; the meter starts from what was committed.
local function open(c, l)
  c.now = now
  if c.T > now then
    if c.T - now <= l.window then c.now = c.T else anchor(c, l) end
  end
  if l.algorithm > SLIDING then
    drain(c, l)
  elseif l.algorithm == LOG then
    expire(c, l)
  else
    roll(c, l)
  end
end

local function wait(c, l, cost)
  if cost <= 0 then return 0 end
  if cost > l.capacity then return NEVER end
  local w = 0
  if l.algorithm > SLIDING then
    local over = c.A - (l.capacity - cost) * l.den
    if over > 0 then w = untilTick(c, l, ceil(over / l.num)) end
  elseif l.algorithm == SLIDING then
    w = slidingWait(c, l, cost)
  elseif l.algorithm == FIXED then
    if c.A > l.quota - cost then w = c.T + l.window - c.now end
  else
    local over = c.S - c.A - (l.quota - cost)
    if over > 0 then w = entry(c, first(c, true, c.A + over)) + l.window - c.now end
  end
  if w <= 0 then return 0 end
  return w + c.now - now
end

local function used(c, l)
  if l.algorithm > SLIDING then return ceil(c.A / l.den) end
  if l.algorithm == SLIDING then
    return c.A + ceil(min(c.B, floor(EXACT / l.ticks)) * left(c, l) / l.ticks)
  end
  if l.algorithm == FIXED then return c.A end
  return c.S - c.A
end

local function giveBack(c, l, units, mark)
  local a, b = c.A, c.B
  if l.algorithm > SLIDING then
    if c.now < mark then c.A = max(0, a - min(units, floor(EXACT / l.den)) * l.den) end
  elseif l.algorithm == LOG then
    return remove(c, units, mark)
  elseif mark == c.T then
    c.A = max(0, a - units)
  elseif mark == c.T - l.window then
    c.B = max(0, b - units)
  end
  if c.A ~= a or c.B ~= b then c.changed = true end
end

local function take(c, l, cost, mark)
  if cost == 0 then return 0 end
  c.limit = l
  if cost < 0 then
    giveBack(c, l, -cost, mark)
    return mark
  end
  c.changed = true
  if l.algorithm > SLIDING then
    c.A = min(c.A + min(cost, floor(EXACT / l.den)) * l.den, l.ceiling)
    return c.now + untilTick(c, l, ceil(c.A / l.num))
  elseif l.algorithm == LOG then
    append(c, cost)
    return c.now
  end
  c.A = min(c.A + cost, EXACT)
  return c.T
end

-- clear makes a counter that says nothing the same as one that was never seen.
local function clear(c)
  c.T, c.A, c.B = 0, 0, 0
  if c.S then c.S, c.head, c.n, c.raw = 0, 0, 0, '' end
end

-- write keeps what changed, with the time after which it says no more than a missing key.
local function write(c)
  if c.idle then return call('DEL', c.key) end
  local l, idle = c.limit, c.now - now
  if l.algorithm > SLIDING then
    idle = idle + ceil(c.A / l.num) * l.tick
  elseif l.algorithm == SLIDING then
    idle = c.T + 2 * l.window - now
  else
    idle = c.T + l.window - now
  end
  local ttl = ceil(max(idle, 0) / 1000) + PAD
  if l.algorithm ~= LOG then
    call('SET', c.key, pack(STATE, FORMAT, c.T0, c.A0, c.B0), 'PX', ttl)
    return
  end
  if not c.raw and c.head <= c.n - c.head then
    call('SETRANGE', c.key, 0, header(c, ''))
    call('PEXPIRE', c.key, ttl)
    return
  end
  local live
  if c.raw then
    live = c.raw:sub(c.head * ENTRY_SIZE + 1, c.n * ENTRY_SIZE)
  else -- mostly dead: shorten
    live = call('GETRANGE', c.key, HEADER_SIZE + c.head * ENTRY_SIZE, HEADER_SIZE + c.n * ENTRY_SIZE - 1)
  end
  c.n, c.head = c.n - c.head, 0
  call('SET', c.key, header(c, live), 'PX', ttl)
end

-- The call.

local limits, counters, order = {}, {}, {}
local charges, pos = ARGV[2], 1

local function limit(i)
  local l = limits[i]
  if not l then
    l = {}
    l.algorithm, l.capacity, l.quota, l.window, l.tick, l.ticks, l.num, l.den, l.ceiling =
      unpack('>Bi8i8i8i8i8i8i8i8', ARGV[1], i * 65 + 1)
    limits[i] = l
  end
  return l
end

-- counter returns the counter of a key, opened for a new batch.
local function counter(key, l, batch)
  local c = counters[key]
  if c == nil then
    c = read(key, l)
    counters[key] = c
    order[#order + 1] = c
  end
  if c and c.batch ~= batch then
    c.batch, c.limit, c.changed = batch, c.limit or l, false
    if c.T0 then c.T, c.A, c.B = c.T0, c.A0, c.B0 end
  end
  return c
end

local L, C, cost, mark, hold, peek, force, dry, ok, retry = {}, {}, {}, {}, {}, {}, {}, {}, {}, {}
local reply, answered = {}, 0

-- decode reads one batch from the charges and returns how many it has.
local function decode(batch)
  local n, flags, index = 0, 0, 0
  repeat
    n = n + 1
    flags, index, pos = unpack('>BH', charges, pos)
    peek[n], force[n], dry[n] = flags >= 16, flags % 16 >= 8, flags % 8 >= 4
    if flags % 4 >= 2 then
      cost[n], mark[n], hold[n], pos = unpack('>i8i8i8', charges, pos)
    else
      cost[n], mark[n], hold[n] = 1, 0, 0
    end
    L[n] = limit(index)
    C[n] = counter(KEYS[answered + n], L[n], batch)
  until flags % 2 == 1
  return n
end

-- asked is what charge i asks of its counter together with the other charges of the batch that would be
-- committed to it. A dry run counts the enforced charges, never the other way round.
local function asked(i, n)
  if force[i] or cost[i] <= 0 then return 0 end
  local total = cost[i]
  if peek[i] or n == 1 then return total end
  for j = 1, n do
    if j ~= i and C[j] == C[i] and not peek[j] and cost[j] > 0 and not (dry[j] and not dry[i]) then
      total = min(total + cost[j], EXACT)
    end
  end
  return total
end

-- decide answers a batch of n charges; all are committed or none.
local function decide(n)
  local commit = true
  for i = 1, n do open(C[i], L[i]) end
  for i = 1, n do
    local a = asked(i, n)
    local w = wait(C[i], L[i], a)
    if w ~= 0 then
      if hold[i] > 0 then w = wait(C[i], L[i], a + hold[i]) end
      commit = commit and (dry[i] or peek[i])
    end
    ok[i], retry[i] = w == 0, w
  end
  for i = 1, n do
    local give = 0
    if commit and ok[i] and not peek[i] then give = take(C[i], L[i], cost[i], mark[i]) end
    mark[i] = give
  end
  for i = 1, n do
    local c, l = C[i], L[i]
    local remaining, more = max(0, l.capacity - used(c, l)), NEVER
    if remaining < l.capacity then more = wait(c, l, remaining + 1) end
    reply[answered + i] = pack('>Bi8i8i8i8', ok[i] and 1 or 0, remaining, retry[i], more, mark[i])
  end
  for i = 1, n do
    local c = C[i]
    if c.changed then
      c.dirty = true
      c.idle = used(c, L[i]) == 0
      if c.idle then clear(c) end
      if c.T0 then c.T0, c.A0, c.B0 = c.T, c.A, c.B end
    end
  end
end

local batch = 0
while pos <= #charges do
  batch = batch + 1
  local n, readable = decode(batch), true
  for i = 1, n do readable = readable and C[i] end
  if readable then
    decide(n)
  else
    for i = 1, n do reply[answered + i] = pack('>Bi8i8i8i8', 2, 0, 0, 0, 0) end
  end
  answered = answered + n
end
for i = 1, #order do
  local c = order[i]
  if c and c.dirty then write(c) end
end
return table.concat(reply)
