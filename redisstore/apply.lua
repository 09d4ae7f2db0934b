-- The three kernels and the batch rule of package algorithms, for Redis: what Decide does there is done here,
-- number for number. A prologue sets `now` (µs): Redis's TIME in production, a given moment in tests.
--
-- KEYS[i]  the counter of the i-th charge
-- ARGV[1]  the distinct limits, 49 bytes each; ARGV[2] the charges: see wire.go
-- returns  33 bytes a charge: status, remaining, retry, next, mark
--
-- Lua's numbers are doubles: whole numbers are exact to 2^53. Compile keeps products below 2^52. A number that
-- becomes text loses digits above 1e14, so numbers leave this script only through struct.pack and as arguments of
-- redis.call; a test forbids every other way.
--
-- Redis makes every function and table of a script anew at every call, and calling floor costs more than computing it.
-- So functions are few, tables get their size at birth, and for a ≥ 0
--   (a - a % b) / b  is floor(a / b),    (a + -a % b) / b  is ceil(a / b).

local unpack, pack, call = struct.unpack, struct.pack, redis.call

local EXACT = 4503599627370496 -- 2^52
local NEVER = -1
local PAD = 60000 -- ms that a key outlives its use: a TTL is garbage collection, nothing is decided by it
local FORMAT = 1 -- of the state: format, T, A, B
local FIXED, LOG, SLIDING = 1, 2, 3 -- greater: the meter

-- log makes the functions of the log kernel, which few calls need.
--
-- State: format, T, A, S (the last running sum), head, n, then n entries (moment, running sum), those before head dead;
-- counted from 0. A small log is read and written whole; of a large one only what a decision needs.
local function log()
  local HEADER, ENTRY, HEADER_SIZE, ENTRY_SIZE = '>BI7I7I7I4I4c0', '>I7I7', 30, 14
  local SMALL = 64 -- entries
  local min, floor = math.min, math.floor
  local k = {}

  -- read returns a counter, or false when its state is in a format that this version does not know.
  function k.read(key, l)
    local c = {key = key, limit = l, T = 0, A = 0, S = 0, head = 0, n = 0, raw = ''}
    local v = redis.pcall('GETRANGE', key, 0, HEADER_SIZE + SMALL * ENTRY_SIZE - 1)
    if type(v) ~= 'string' then return false end
    if #v > 0 then
      if #v < HEADER_SIZE then return false end
      local format
      format, c.T, c.A, c.S, c.head, c.n = unpack('>BI7I7I7I4I4', v)
      if format ~= FORMAT then return false end
      c.raw = c.n <= SMALL and v:sub(HEADER_SIZE + 1)
    end
    return c
  end

  local function entry(c, i)
    if c.raw then return unpack(ENTRY, c.raw, i * ENTRY_SIZE + 1) end
    local from = HEADER_SIZE + i * ENTRY_SIZE
    return unpack(ENTRY, call('GETRANGE', c.key, from, from + ENTRY_SIZE - 1))
  end

  local function header(c, entries)
    return pack(HEADER, FORMAT, c.T, c.A, c.S, c.head, c.n, entries)
  end

  -- put replaces everything from entry i by the given entries, n afterwards in all.
  local function put(c, i, entries, n)
    c.n = n
    if not c.raw then
      call('SETRANGE', c.key, HEADER_SIZE + i * ENTRY_SIZE, entries)
      return
    end
    c.raw = pack('c0c0', c.raw:sub(1, i * ENTRY_SIZE), entries)
    if n > SMALL then -- it becomes a large one
      call('SET', c.key, header(c, c.raw))
      c.raw = false
    end
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

  function k.expire(c, l)
    if c.head == c.n then return end
    local dead = first(c, false, c.now - l.window + 1)
    if dead == c.n then
      c.head, c.n, c.A, c.S, c.raw = 0, 0, 0, 0, ''
    elseif dead > c.head then
      local _, sum = entry(c, dead - 1)
      c.A, c.head = sum, dead
    end
  end

  function k.wait(c, l, over)
    return entry(c, first(c, true, c.A + over)) + l.window - c.now
  end

  -- lower takes units off the running sums from an entry on, a piece at a time.
  local function lower(c, from, units)
    for i = from, c.n - 1, 500 do
      local part, last = {}, min(i + 500, c.n)
      for j = i, last - 1 do
        local at, sum = entry(c, j)
        part[#part + 1] = pack(ENTRY, at, sum - units)
      end
      local bytes = table.concat(part)
      if c.raw then
        c.raw = pack('c0c0c0', c.raw:sub(1, i * ENTRY_SIZE), bytes, c.raw:sub(last * ENTRY_SIZE + 1))
      else
        call('SETRANGE', c.key, HEADER_SIZE + i * ENTRY_SIZE, bytes)
      end
    end
    c.S = c.S - units
  end

  function k.append(c, units)
    if c.A >= EXACT / 2 then -- the sums begin anew, before they leave the exact numbers
      lower(c, c.head, c.A)
      c.A = 0
    end
    c.S = c.A + min(c.S - c.A + units, EXACT)
    local i = c.n
    if i > c.head and entry(c, i - 1) == c.now then i = i - 1 end
    c.T = c.now
    put(c, i, pack(ENTRY, c.now, c.S), i + 1)
  end

  -- remove gives units back to the entry of that moment, if it is still there.
  function k.remove(c, units, mark)
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
    c.changed = true
    lower(c, i, units)
    if sum - units > before or i < c.n - 1 then return end -- an empty entry inside counts for nothing
    c.n = i
    if c.raw then c.raw = c.raw:sub(1, i * ENTRY_SIZE) end
  end

  -- pullBack moves every entry after now to now.
  function k.pullBack(c)
    local i = first(c, false, now)
    c.T = now
    if i < c.n then put(c, i, pack(ENTRY, now, c.S), i + 1) end
  end

  function k.clear(c)
    c.S, c.head, c.n, c.raw = 0, 0, 0, ''
  end

  function k.write(c, ttl)
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

  return k
end

local k -- the log kernel, once it is needed

-- rescale converts a meter's level from one scale to another, rounded up.
local function rescale(level, from, to)
  if from <= 0 then return level end
  local rest = level % from
  local units = (level - rest) / from
  if units > (EXACT - to - (EXACT - to) % to) / to then return EXACT end
  if rest > (EXACT - EXACT % to) / to then return (units + 1) * to end
  local product = rest * to
  return units * to + (product + -product % from) / from
end

-- open brings a counter to the moment that counts. The log and the window open alike for every limit
-- of theirs, so what one batch opened the next may use; the meter starts from what was committed.
local function open(c, l)
  local at, ahead, tick = now, c.T - now, l.tick
  if ahead > 0 then
    if ahead <= l.window then
      at = c.T
    else -- further than the clock can have stepped: anchored to it anew
      c.changed = true
      if l.algorithm > SLIDING then
        c.T = now - now % tick
      elseif l.algorithm == LOG then
        k.pullBack(c)
      else
        c.T = now - now % l.window
      end
    end
  end
  if l.algorithm > SLIDING then
    local level, num = c.A, l.num
    if c.B ~= l.den then
      if level > 0 then
        level = rescale(level, c.B, l.den)
        if level > l.ceiling then level = l.ceiling end
      end
      c.B = l.den
    end
    -- A moment that another tick stored is rounded up: later means less drained, never credit for nothing.
    local t = c.T + -c.T % tick
    if at < t then at = t end
    local elapsed = (at - at % tick - t) / tick
    if elapsed >= (level + -level % num) / num then
      level = 0
    elseif elapsed > 0 then
      level = level - elapsed * num
    end
    c.A = level
    c.T = at - at % tick
  elseif l.algorithm ~= LOG then
    local start = at - at % l.window
    if start ~= c.T then
      if l.algorithm == SLIDING and start == c.T + l.window then c.B = c.A else c.B = 0 end
      c.T, c.A = start, 0
    end
    c.left = l.ticks - (at - start - (at - start) % tick) / tick
  end
  c.now = at
  if l.algorithm == LOG then k.expire(c, l) end
end

-- wait is how long a cost must wait to pass, from now.
local function wait(c, l, cost)
  if cost <= 0 then return 0 end
  if cost > l.capacity then return NEVER end
  local w, tick = 0, l.tick
  if l.algorithm > SLIDING then
    local over = c.A - (l.capacity - cost) * l.den
    if over > 0 then w = (over + -over % l.num) / l.num * tick - c.now % tick end
  elseif l.algorithm == SLIDING then
    local prev, cur, rest, ticks = c.B, c.A, c.left, l.ticks
    if prev > l.most then prev = l.most end
    if cur > l.most then cur = l.most end
    local room = (l.capacity - cur - cost) * ticks
    if room < 0 then
      room = (l.capacity - cost) * ticks
      w = (rest + ticks - (room - room % cur) / cur) * tick - c.now % tick
    elseif prev * rest > room then
      w = (rest - (room - room % prev) / prev) * tick - c.now % tick
    end
  elseif l.algorithm == FIXED then
    if c.A > l.capacity - cost then w = c.T + l.window - c.now end
  else
    local over = c.S - c.A - (l.capacity - cost)
    if over > 0 then w = k.wait(c, l, over) end
  end
  if w <= 0 then return 0 end
  return w + c.now - now
end

-- used is the units in use, rounded up.
local function used(c, l)
  if l.algorithm > SLIDING then return (c.A + -c.A % l.den) / l.den end
  if l.algorithm == SLIDING then
    local prev = c.B
    if prev > l.most then prev = l.most end
    prev = prev * c.left
    return c.A + (prev + -prev % l.ticks) / l.ticks
  end
  if l.algorithm == FIXED then return c.A end
  return c.S - c.A
end

-- giveBack returns units only to what they were taken from, as far as it still stands.
local function giveBack(c, l, units, mark)
  local which = 'A'
  if l.algorithm > SLIDING then
    if c.now >= mark then return end
    local most = (EXACT - EXACT % l.den) / l.den
    if units > most then units = most end
    units = units * l.den
  elseif l.algorithm == LOG then
    return k.remove(c, units, mark)
  elseif mark == c.T - l.window then
    which = 'B'
  elseif mark ~= c.T then
    return
  end
  if c[which] == 0 then return end
  c.changed = true
  c[which] = math.max(0, c[which] - units)
end

-- take commits a charge and returns its mark.
local function take(c, l, cost, mark)
  if cost <= 0 then
    if cost < 0 then giveBack(c, l, -cost, mark) else mark = 0 end
    return mark
  end
  c.changed = true
  if l.algorithm > SLIDING then
    local most, tick = (EXACT - EXACT % l.den) / l.den, l.tick
    if cost > most then cost = most end
    local level = c.A + cost * l.den
    if level > l.ceiling then level = l.ceiling end
    c.A = level
    return c.now + (level + -level % l.num) / l.num * tick - c.now % tick
  elseif l.algorithm == LOG then
    k.append(c, cost)
    return c.now
  end
  c.A = c.A + cost
  if c.A > EXACT then c.A = EXACT end
  return c.T
end

-- write keeps what changed, with the time after which it says no more than a missing key.
local function write(c)
  if c.idle then return call('DEL', c.key) end
  local l, idle = c.limit, c.T - now
  if l.algorithm > SLIDING then
    idle = c.now - now + (c.A0 + -c.A0 % l.num) / l.num * l.tick
  elseif l.algorithm == SLIDING then
    idle = idle + 2 * l.window
  else
    idle = idle + l.window
  end
  local ttl = (idle + -idle % 1000) / 1000 + PAD
  if l.algorithm == LOG then return k.write(c, ttl) end
  call('SET', c.key, pack('>BI7I7I7', FORMAT, c.T0, c.A0, c.B0), 'PX', ttl)
end

-- One batch, reused for the next: limit, counter, cost, mark, held and flags of its charges, and their waits.
local L, C, cost, mark, held, flag, retry = {false}, {false}, {0}, {0}, {0}, {0}, {0}

local limits, counters, reply = {false}, {}, {''}
local charges, pos, answered, batch, last = ARGV[2], 1, 0, 0, nil

while pos <= #charges do
  batch = batch + 1
  local n, flags, index, readable = 0, 0, 0, true
  repeat -- read the charges up to the last of the batch
    n = n + 1
    flags, index, pos = unpack('>BH', charges, pos)
    if flags % 4 >= 2 then
      cost[n], mark[n], held[n], pos = unpack('>i8i8i8', charges, pos)
    else
      cost[n], mark[n], held[n] = 1, 0, 0
    end
    flag[n] = flags
    local l, key = limits[index + 1], KEYS[answered + n]
    if not l then -- the log and the window send their ticks where the meter sends num
      local algorithm, capacity, window, tick, num, den, ceiling = unpack('>Bi8i8i8i8i8i8', ARGV[1], index * 49 + 1)
      if algorithm == LOG then k = k or log() end
      l = {
        algorithm = algorithm, capacity = capacity, window = window, tick = tick,
        num = num, den = den, ceiling = ceiling, ticks = num, most = (EXACT - EXACT % num) / num,
      }
      limits[index + 1] = l
    end
    local c = counters[key]
    if c == nil then -- T0, A0 and B0 are what was committed
      if l.algorithm == LOG then
        c = k.read(key, l)
      else
        local v, format, t, a, b = redis.pcall('GET', key), FORMAT, 0, 0, 0
        if v then
          format = 0
          if type(v) == 'string' and #v == 22 then format, t, a, b = unpack('>BI7I7I7', v) end
        end
        c = format == FORMAT and {
          key = key, limit = l, T = t, A = a, B = b, T0 = t, A0 = a, B0 = b,
          now = 0, left = 0, batch = 0, changed = false, dirty = false, idle = false, previous = false,
        }
      end
      if c then
        c.previous = last
        last = c
      end
      counters[key] = c
    end
    L[n], C[n] = l, c
    if not c then
      readable = false
    elseif c.batch ~= batch then
      c.batch, c.changed = batch, false
      if c.T0 then c.T, c.A, c.B = c.T0, c.A0, c.B0 end
    end
  until flags % 2 == 1

  -- All are decided at one moment, and committed if none refuses that is neither a dry run (4) nor a peek (16);
  -- a forced one (8) is not asked.
  local commit = true
  if readable then
    for i = 1, n do open(C[i], L[i]) end
    for i = 1, n do
      local w = 0
      if flag[i] % 16 < 8 then
        local a = cost[i]
        if n > 1 and flag[i] < 16 and a > 0 then
          -- Decided on the sum with the other charges of the batch that would be committed to the counter.
          -- A dry run counts the enforced charges, never the other way round.
          for j = 1, n do
            local f = flag[j]
            if j ~= i and C[j] == C[i] and f < 16 and cost[j] > 0 and not (f % 8 >= 4 and flag[i] % 8 < 4) then
              a = a + cost[j]
              if a > EXACT then a = EXACT + 1 end
            end
          end
        end
        w = wait(C[i], L[i], a)
        if w ~= 0 then
          if held[i] > 0 then w = wait(C[i], L[i], a + held[i]) end
          commit = commit and flag[i] >= 4
        end
      end
      retry[i] = w
    end
    for i = 1, n do
      if commit and retry[i] == 0 and flag[i] < 16 then
        mark[i] = take(C[i], L[i], cost[i], mark[i])
        C[i].limit = L[i]
      else
        mark[i] = 0
      end
    end
  end
  for i = 1, n do
    local c, l, status, remaining, more = C[i], L[i], 2, 0, NEVER
    if readable then
      local u = used(c, l)
      remaining = l.capacity - u
      if remaining < 0 then remaining = 0 end
      if remaining < l.capacity then more = wait(c, l, remaining + 1) end
      status = retry[i] == 0 and 1 or 0
      if c.changed then
        c.dirty, c.idle = true, u == 0
      end
    end
    reply[answered + i] = pack('>Bi8i8i8i8', status, remaining, retry[i], more, mark[i])
  end
  if readable then
    for i = 1, n do
      local c = C[i]
      if c.changed then
        if c.idle then -- says nothing: the same as a counter that was never seen
          c.T, c.A, c.B = 0, 0, 0
          if c.S then k.clear(c) end
        end
        if c.T0 then c.T0, c.A0, c.B0 = c.T, c.A, c.B end
      end
    end
  end
  answered = answered + n
end

while last do
  if last.dirty then write(last) end
  last = last.previous
end
if answered == 1 then return reply[1] end
return table.concat(reply)
