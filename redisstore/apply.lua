-- The three kernels and the batch rule of package algorithms, for Redis: what Decide does there is done here,
-- number for number. A prologue sets `now` (µs): Redis's TIME in production, a given moment in tests.
--
-- KEYS[i]  the counter of the i-th charge
-- ARGV[1]  the distinct limits, 65 bytes each; ARGV[2] a byte that is 1 if no log is among them, then the charges: see wire.go
-- returns  33 bytes a charge: status, remaining, retry (the delay, if it passes), next, mark
--
-- Lua's numbers are doubles: whole numbers are exact to 2^53. Compile keeps products below 2^52. A number that
-- becomes text loses digits above 1e14, so numbers leave this script only through struct.pack and as arguments of
-- redis.call; a test forbids every other way.
--
-- Redis makes every function and table of a script anew at every call, and calling floor costs more than computing it.
-- So functions are few, tables get their size at birth, and for a ≥ 0
--   (a - a % b) / b  is floor(a / b),    (a + -a % b) / b  is ceil(a / b).

local spread, byte = unpack, string.byte
local unpack, pack, call = struct.unpack, struct.pack, redis.call

local EXACT = 4503599627370496 -- 2^52
local NEVER, UNKNOWN = -1, -2
local PAD = 60000000 -- µs that a key outlives its use: a TTL is garbage collection, nothing is decided by it
-- The state: format, T, A, B, and the second of its end. SETRANGE costs a third of SET with a TTL.
local FORMAT, STATE, STATE_SIZE = 1, '>BI7I7I7I5', 27
local LEASES, FIXED, LOG, SLIDING, METER = 1, 2, 3, 4, 5 -- algorithms.Kernel

-- The row in which a charge of a batch of several is put by, until the batch is decided. A charge that comes alone, as
-- most do, stays in hand. From AT on it is the charge's counter: at, T, A, B, left, lives, changed, and for a log its
-- kernel's table. OWNER is the first charge of the batch on the same counter; its row keeps the counter.
local FLAGS, COST, MARK, HELD, LIMIT, KEY, RETRY, DELAY, OWNER = 1, 2, 3, 4, 5, 6, 7, 8, 9
local AT, KERNEL = 10, 17

-- rare makes the functions that few calls need: the log kernel, another scale, giving back, and counters that several
-- charges of a batch share.
--
-- State of a log: format, T, A, S, head, n, then n entries (moment, units), those before head dead; counted from 0.
-- A is the units that left at the head, S those and the live ones. An entry of a sliding log holds S as it was then, so that
-- a wait is two binary searches. One of leases holds its own units: nobody asks how long they last, and they are given back
-- in any order, which would change each younger sum. What was given back leaves an empty entry until the log is compacted.
-- A small log is read and written whole; of a large one only what a decision needs.
local function rare()
  local HEADER, ENTRY, HEADER_SIZE, ENTRY_SIZE = '>BI7I7I7I4I4c0', '>I7I7', 30, 14
  local SMALL = 64 -- entries
  local PIECE = 500 -- entries read at once
  local min, max, floor = math.min, math.max, math.floor
  local k = {}

  -- read returns a counter, or false when its state is in a format that this version does not know.
  function k.read(key, l)
    local c = {key = key, own = l.kernel == LEASES, T = 0, A = 0, S = 0, head = 0, n = 0, raw = ''}
    local v = redis.pcall('GETRANGE', key, 0, HEADER_SIZE + SMALL * ENTRY_SIZE - 1)
    if type(v) ~= 'string' then return false end
    if #v > 0 then
      if #v < HEADER_SIZE then return false end
      local format
      format, c.T, c.A, c.S, c.head, c.n = unpack('>BI7I7I7I4I4', v)
      -- A state that only says that it is long would keep Redis busy for minutes. So the last entry must be there.
      local last = HEADER_SIZE + c.n * ENTRY_SIZE
      local size = #v
      if c.n > SMALL then size = last - ENTRY_SIZE + #call('GETRANGE', key, last - ENTRY_SIZE, last - 1) end
      if format ~= FORMAT or c.head > c.n or size < last then return false end
      c.raw = c.n <= SMALL and v:sub(HEADER_SIZE + 1)
    end
    return c
  end

  -- bytes returns the entries from i to before last.
  local function bytes(c, i, last)
    if c.raw then return c.raw:sub(i * ENTRY_SIZE + 1, last * ENTRY_SIZE) end
    return call('GETRANGE', c.key, HEADER_SIZE + i * ENTRY_SIZE, HEADER_SIZE + last * ENTRY_SIZE - 1)
  end

  local function entry(c, i)
    if c.raw then return unpack(ENTRY, c.raw, i * ENTRY_SIZE + 1) end
    return unpack(ENTRY, bytes(c, i, i + 1))
  end

  local function header(c, entries)
    return pack(HEADER, FORMAT, c.T, c.A, c.S, c.head, c.n, entries)
  end

  -- put writes entries in the place of those from i on, of which there may be fewer.
  local function put(c, i, entries)
    local from = i * ENTRY_SIZE
    local last = from + #entries
    c.n = max(c.n, last / ENTRY_SIZE)
    if not c.raw then
      call('SETRANGE', c.key, HEADER_SIZE + from, entries)
      return
    end
    c.raw = pack('c0c0c0', c.raw:sub(1, from), entries, c.raw:sub(last + 1))
    if c.n > SMALL then -- it becomes a large one
      call('SET', c.key, header(c, c.raw))
      c.raw = false
    end
  end

  -- first is the first live entry whose moment (by sum: whose sum) is at least bound, or n.
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

  -- held is the units of the live entries from i to before last.
  local function held(c, i, last)
    if not c.own then
      local _, before, after = nil, c.A
      if i > c.head then _, before = entry(c, i - 1) end
      _, after = entry(c, last - 1)
      return after - before
    end
    local total = 0
    for from = i, last - 1, PIECE do
      local part = bytes(c, from, min(from + PIECE, last))
      for pos = 1, #part, ENTRY_SIZE do
        local _, units = unpack(ENTRY, part, pos)
        total = total + units
      end
    end
    return total
  end

  function k.expire(c, l)
    if c.head == c.n then return end
    local dead = first(c, false, c.now - l.window + 1)
    if dead == c.n then
      c.head, c.n, c.A, c.S, c.raw = 0, 0, 0, 0, ''
    elseif dead > c.head then
      c.A, c.head = c.A + held(c, c.head, dead), dead
    end
  end

  function k.wait(c, l, over)
    return entry(c, first(c, true, c.A + over)) + l.window - c.now
  end

  -- lower takes units off the sums from an entry on.
  local function lower(c, i, units)
    for from = i, c.n - 1, PIECE do
      local part, lowered = bytes(c, from, min(from + PIECE, c.n)), {}
      for pos = 1, #part, ENTRY_SIZE do
        local at, sum = unpack(ENTRY, part, pos)
        lowered[#lowered + 1] = pack(ENTRY, at, sum - units)
      end
      put(c, from, table.concat(lowered))
    end
  end

  function k.append(c, units)
    if c.A >= EXACT / 2 then -- the sums begin anew, before they leave the exact numbers
      if not c.own then lower(c, c.head, c.A) end
      c.S, c.A = c.S - c.A, 0
    end
    units = min(units, EXACT - (c.S - c.A))
    c.S, c.T = c.S + units, c.now
    local i = c.n
    if i > c.head then
      local at, before = entry(c, i - 1)
      if at == c.now then
        i = i - 1
        units = before + units -- of leases
      end
    end
    put(c, i, pack(ENTRY, c.now, c.own and units or c.S))
  end

  -- remove gives units back to the entry of that moment, if it is still there: whether it did. Empty entries at either end go
  -- at once.
  function k.remove(c, units, mark)
    local i = first(c, false, mark)
    if i == c.n or entry(c, i) ~= mark then return false end
    local had = held(c, i, i + 1)
    units = min(units, had)
    if units == 0 then return false end
    if c.own then put(c, i, pack(ENTRY, mark, had - units)) else lower(c, i, units) end
    c.S = c.S - units
    if units == had and i == c.head then
      repeat c.head = c.head + 1 until c.head == c.n or held(c, c.head, c.head + 1) > 0
    elseif units == had and i == c.n - 1 then
      repeat c.n = c.n - 1 until c.head == c.n or held(c, c.n - 1, c.n) > 0
    end
    return true
  end

  -- pullBack moves every entry after now to now.
  function k.pullBack(c)
    local i = first(c, false, now)
    c.T = now
    if i < c.n then
      local value = c.own and held(c, i, c.n) or c.S
      c.n = i
      put(c, i, pack(ENTRY, now, value))
    end
  end

  -- compact returns the live entries without the empty ones.
  local function compact(c)
    local full, before = {}, c.own and 0 or c.A
    for from = c.head, c.n - 1, PIECE do
      local part = bytes(c, from, min(from + PIECE, c.n))
      for pos = 1, #part, ENTRY_SIZE do
        local _, value = unpack(ENTRY, part, pos)
        if value > before then full[#full + 1] = part:sub(pos, pos + ENTRY_SIZE - 1) end
        before = c.own and 0 or value
      end
    end
    return table.concat(full)
  end

  function k.write(c, ttl)
    local live
    if c.n - c.head > 2 * (c.S - c.A) + SMALL then -- most are empty, since each that is not holds a unit
      live = compact(c)
    elseif c.raw or c.head > c.n - c.head -- small, or mostly dead, or the youngest went
      or call('SETRANGE', c.key, 0, header(c, '')) > HEADER_SIZE + 2 * c.n * ENTRY_SIZE then
      live = bytes(c, c.head, c.n)
    else
      call('PEXPIRE', c.key, ttl)
      return
    end
    c.head, c.n, c.raw = 0, #live / ENTRY_SIZE, live
    call('SET', c.key, header(c, live), 'PX', ttl)
  end

  -- rescale converts a meter's level from one scale to another, rounded up.
  function k.rescale(level, from, to)
    if from <= 0 then return level end
    local rest = level % from
    local units = (level - rest) / from
    if units > (EXACT - to - (EXACT - to) % to) / to then return EXACT end
    if rest > (EXACT - EXACT % to) / to then return (units + 1) * to end
    local product = rest * to
    return units * to + (product + -product % from) / from
  end

  -- giveBack returns units only to what they were taken from, as far as it still stands: A, B, changed. Of a queue only
  -- the last slot can be given back, unless it is forced.
  function k.giveBack(l, units, mark, force, at, T, A, B, c)
    if c then return A, B, k.remove(c, units, mark) end
    if l.kernel == METER then
      if at >= mark or A == 0 then return A, B, false end
      local empty = at + (A + -A % l.num) / l.num * l.tick - at % l.tick
      if l.slack and not force and mark ~= empty then return A, B, false end
      local most = (EXACT - EXACT % l.den) / l.den
      if units > most then units = most end
      return max(0, A - units * l.den), B, true
    end
    if mark == T and A > 0 then return max(0, A - units), B, true end
    if mark == T - l.window and B > 0 then return A, max(0, B - units), true end
    return A, B, false
  end

  function k.putBack(row, at, T, A, B, left, changed)
    row[AT], row[AT + 1], row[AT + 2], row[AT + 3], row[AT + 4], row[AT + 6] = at, T, A, B, left, changed
  end

  -- together decides a batch in which charges share a counter: on the sum with the others that would be committed to it.
  -- A dry run counts the enforced charges, never the other way round. It reports whether the batch is committed.
  function k.together(rows, n, wait)
    local commit = true
    for i = 1, n do
      local row = rows[i]
      local flags, asked = row[FLAGS], row[COST]
      if flags % 16 >= 8 or asked < 0 then asked = 0 end
      if flags < 16 and asked > 0 then
        for j = 1, n do
          local other = rows[j]
          local f = other[FLAGS]
          if j ~= i and other[OWNER] == row[OWNER] and f < 16 and other[COST] > 0 and not (f % 8 >= 4 and flags % 8 < 4) then
            asked = asked + other[COST]
            if asked > EXACT then asked = EXACT + 1 end
          end
        end
      end
      local at, T, A, B, left, _, _, c = spread(rows[row[OWNER]], AT, KERNEL)
      row[RETRY] = wait(row[LIMIT], asked, row[HELD], at, T, A, B, left, c)
      commit = commit and (row[RETRY] == 0 or flags >= 4 and flags < 32)
    end
    return commit
  end

  return k
end

local k -- what rare made, once it is needed

-- open brings a counter to the moment that counts: at, T, A, B, left, changed.
local function open(l, T, A, B, c)
  local at, ahead, tick, changed = now, T - now, l.tick, false
  if ahead > 0 then
    if ahead <= l.window then
      at = T
    else -- further than the clock can have stepped: anchored to it anew
      changed = true
      if c then
        k.pullBack(c)
      elseif l.kernel == METER then
        T = now - now % tick
      else
        T = now - now % l.window
      end
    end
  end
  if c then
    c.now = at
    k.expire(c, l)
    return at, T, A, B, 0, changed
  end
  if l.kernel == METER then
    -- A moment that another tick stored is rounded up: later means less drained, never credit for nothing.
    T = T + -T % tick
    if at < T then at = T end
    local den, last = l.den, at - at % tick
    if A > 0 then
      local num, elapsed = l.num, (last - T) / tick
      if B ~= den then
        k = k or rare()
        A = k.rescale(A, B, den)
      end
      if A > l.ceiling then A = l.ceiling end -- also when another quota has the same scale
      if elapsed >= (A + -A % num) / num then
        A = 0
      elseif elapsed > 0 then
        A = A - elapsed * num
      end
    end
    return at, last, A, den, 0, changed
  end
  local start = at - at % l.window
  if start ~= T then
    if l.kernel == SLIDING and start == T + l.window then B = A else B = 0 end
    T, A = start, 0
  end
  return at, T, A, B, l.ticks - (at - start - (at - start) % tick) / tick, changed
end

-- wait is how long a cost must wait to pass, from now; a retry asks for what is held as well.
local function wait(l, cost, held, at, T, A, B, left, c)
  if cost <= 0 then return 0 end
  if cost > l.capacity then return NEVER end
  local w, room = 0, l.capacity - cost
  if l.kernel == METER then
    local over = A - room * l.den
    if l.latest and A - l.latest > over then over = A - l.latest end
    if over > 0 then w = (over + -over % l.num) / l.num * l.tick - at % l.tick end
  elseif l.kernel == SLIDING then
    local ticks, tick = l.ticks, l.tick
    if B > l.most then B = l.most end
    if A > l.most then A = l.most end
    if room < A then
      room = room * ticks
      w = (left + ticks - (room - room % A) / A) * tick - at % tick
    else
      room = (room - A) * ticks
      if B * left > room then w = (left - (room - room % B) / B) * tick - at % tick end
    end
  elseif c then
    local over = c.S - c.A - room
    if over > 0 and l.kernel == LEASES then return cost + held > l.capacity and NEVER or UNKNOWN end
    if over > 0 then w = k.wait(c, l, over) end
  elseif A > room then
    w = T + l.window - at
  end
  if w <= 0 then return 0 end
  if held > 0 then return wait(l, cost + held, 0, at, T, A, B, left, c) end
  return w + at - now
end

-- delay is how long a charge that passes must be held in a queue, from now.
local function delay(l, cost, at, A)
  local over = A - l.slack
  if over <= 0 or cost <= 0 then return 0 end
  return (over + -over % l.num) / l.num * l.tick - at % l.tick + at - now
end

-- used is the units in use, rounded up.
local function used(l, A, B, left, c)
  if l.kernel == METER then return (A + -A % l.den) / l.den end
  if c then return c.S - c.A end
  if B == 0 or l.kernel == FIXED then return A end
  if B > l.most then B = l.most end
  B = B * left
  return A + (B + -B % l.ticks) / l.ticks
end

-- take commits a cost above 0: A, mark.
local function take(l, cost, at, T, A, c)
  if l.kernel == METER then
    local den, num, tick = l.den, l.num, l.tick
    local most = (EXACT - EXACT % den) / den
    if cost > most then cost = most end
    A = A + cost * den
    if A > l.ceiling then A = l.ceiling end
    return A, at + (A + -A % num) / num * tick - at % tick
  elseif c then
    k.append(c, cost)
    return A, at
  end
  A = A + cost
  if A > EXACT then A = EXACT end
  return A, T
end

-- write keeps a counter until it says no more than a missing key.
local function write(key, l, at, T, A, B, lives, c)
  local idle = T + l.window
  if l.kernel == METER then
    idle = at + (A + -A % l.num) / l.num * l.tick
  elseif l.kernel == SLIDING then
    idle = idle + l.window
  elseif c then
    idle = at + l.window - now
    return k.write(c, (idle + -idle % 1000) / 1000 + PAD / 1000)
  end
  idle = idle + PAD
  if lives * 1000000 >= idle then -- its TTL stays as it is
    call('SETRANGE', key, '0', pack(STATE, FORMAT, T, A, B, lives))
    return
  end
  idle = idle + PAD / 2 -- so that not every request moves it
  lives = (idle + -idle % 1000000) / 1000000
  call('SET', key, pack(STATE, FORMAT, T, A, B, lives), 'PX', lives * 1000 - (now - now % 1000) / 1000)
end

-- outlive makes a key last as long as the wait that is told of it: another plan, or the limit before a reload, may have
-- written an earlier end.
local function outlive(key, lives, wait)
  local last = now + wait + PAD
  if lives * 1000000 >= last then return end
  last = last + PAD / 2
  lives = (last + -last % 1000000) / 1000000
  call('SETRANGE', key, STATE_SIZE - 5, pack('>I5', lives))
  call('PEXPIRE', key, lives * 1000 - (now - now % 1000) / 1000)
end

-- limit reads the i-th limit; the log and the window send their ticks where the meter sends num.
local function limit(i)
  local kernel, capacity, window, tick, num, den, ceiling, slack, latest = unpack('>Bi8i8i8i8i8i8i8i8', ARGV[1], i * 65 - 64)
  if kernel == METER then
    local l = {
      kernel = kernel, capacity = capacity, window = window, tick = tick, num = num, den = den, ceiling = ceiling,
    }
    if slack < EXACT then l.slack, l.latest = slack, latest end -- only a queue has them
    return l
  end
  local log = kernel == LOG or kernel == LEASES
  if not log and kernel ~= FIXED and kernel ~= SLIDING then error('a kernel that this script lacks') end
  if log then k = k or rare() end
  return {
    kernel = kernel, capacity = capacity, window = window, tick = tick, log = log,
    ticks = num, most = (EXACT - EXACT % num) / num,
  }
end

-- read returns a counter: T, A, B, lives, log; T is false when its state is in a format that this version does not know.
-- The state is v if it was read already.
local function read(key, l, v)
  if l.log then
    local c = k.read(key, l)
    return c and c.T, 0, 0, 0, c
  end
  if v == nil then v = redis.pcall('GET', key) end
  if not v then return 0, 0, 0, 0 end
  if type(v) ~= 'string' or #v ~= STATE_SIZE then return false end
  local format, T, A, B, lives = unpack(STATE, v)
  return format == FORMAT and T, A, B, lives
end

local rows
local limits, reply = {false}, {''}
local charges, pos, answered = ARGV[2], 2, 0

-- Read together, counters cost half as much, and what is no string counts as missing. Only a key that comes again must be read
-- anew, after the batch that wrote it.
local states = #KEYS > 1 and byte(charges) == 1 and call('MGET', spread(KEYS))

while pos <= #charges do
  local flags, cost, mark, held, l, key, retry, late, owner, at, T, A, B, left, lives, changed, c
  local n, commit, readable, shared = 0, true, true, false

  repeat -- up to the last charge of the batch; all are decided at one moment
    n = n + 1
    local high, low
    flags, high, low = byte(charges, pos, pos + 2)
    local state
    if flags >= 64 then
      flags = flags - 64
    elseif states then
      state = states[answered + n]
    end
    cost, mark, held, pos = 1, 0, 0, pos + 3
    if flags % 4 >= 2 then cost, mark, held, pos = unpack('>i8i8i8', charges, pos) end
    low = high * 256 + low + 1
    l = limits[low]
    if not l then
      l = limit(low)
      limits[low] = l
    end
    key, owner = KEYS[answered + n], n
    for j = 1, n - 1 do
      if rows[j][KEY] == key then
        owner, shared, k = rows[j][OWNER], true, k or rare()
        break
      end
    end
    local anchored = false
    if owner == n then
      T, A, B, lives, c = read(key, l, state)
    else
      at, T, A, B, left, lives, anchored, c = spread(rows[owner], AT, KERNEL)
    end
    if T then
      at, T, A, B, left, changed = open(l, T, A, B, c)
      retry = wait(l, flags % 16 < 8 and cost or 0, held, at, T, A, B, left, c)
      late = l.slack and delay(l, cost, at, A) or 0
      -- Committed if none refuses that is neither a dry run (4) nor a peek (16); a forced one (8) is not asked, and
      -- a check (32) refuses but is not committed.
      commit = commit and (retry == 0 or flags >= 4 and flags < 32)
    else
      readable = false
    end
    if n > 1 or flags % 2 == 0 then
      rows = rows or {false, false, false, false}
      rows[n] = {flags, cost, mark, held, l, key, retry, late, owner, at, T, A, B, left, lives, changed, c}
      if owner < n then k.putBack(rows[owner], at, T, A, B, left, changed or anchored) end
    end
  until flags % 2 == 1

  if shared and readable then commit = k.together(rows, n, wait) end

  -- What charges on one counter take shows in the answers to all of them, so then all is taken before the first answer.
  for round = shared and readable and 1 or 2, 2 do
    for i = 1, n do
      if n > 1 then
        flags, cost, mark, held, l, key, retry, late, owner, at, T, A, B, left, lives, changed, c = spread(rows[i], 1, KERNEL)
        if owner < i then at, T, A, B, left, lives, changed, c = spread(rows[owner], AT, KERNEL) end
      end
      if readable and (round == 1 or not shared) then
        if not commit or retry ~= 0 or flags >= 16 or cost == 0 then
          mark = 0
        elseif cost > 0 then
          A, mark = take(l, cost, at, T, A, c)
          changed = true
        else
          local given
          k = k or rare()
          A, B, given = k.giveBack(l, -cost, mark, flags % 16 >= 8, at, T, A, B, c)
          if given then changed = true else mark = 0 end
        end
        if shared then
          rows[i][MARK] = mark
          k.putBack(rows[owner], at, T, A, B, left, changed)
        end
      end
      if round == 2 then
        local status, remaining, more = 2, 0, NEVER
        if not readable then
          retry, mark = 0, 0
          if c and changed and owner == i then write(key, l, at, T, A, B, lives, c) end -- its entries were pulled back already
        else
          local inUse = used(l, A, B, left, c)
          remaining = l.capacity - inUse
          if remaining < 0 or l.latest and A > l.latest then remaining = 0 end
          if remaining < l.capacity then
            -- What remains is used first, as early as it can be: in the sliding-window counter it weighs on.
            if l.kernel == SLIDING then
              more = wait(l, 1, 0, at, T, A + remaining, B, left, c)
            else
              more = wait(l, remaining + 1, 0, at, T, A, B, left, c)
            end
          end
          status = retry == 0 and 1 or 0
          if retry == 0 then retry = late end
          if changed and owner == i then
            -- What says nothing is the same as a counter that was never seen.
            if inUse == 0 then call('DEL', key) else write(key, l, at, T, A, B, lives, c) end
          elseif not changed and lives > 0 and (status == 0 or more > 0) then
            outlive(key, lives, retry > more and retry or more)
          end
        end
        reply[answered + i] = pack('>Bi8i8i8i8', status, remaining, retry, more, mark)
      end
    end
  end
  answered = answered + n
end

if answered == 1 then return reply[1] end
return table.concat(reply)
