/* A libnvidia-ml.so.1 whose GPUs are lines of the file that HOPTRACE_NVML_STUB names, read anew at each call:
 *
 *   init=CODE driver=TEXT count=N index.I=N (which GPU has index I); xid=NUMBER:N:XID (told once for each larger NUMBER)
 *   lost.N=1 hang.N=1 fail.N=CODE; mem.total.N mem.reserved.N mem.used.N mem.free.N clock.N.TYPE reasons.N gen.N width.N busy.N
 *   f.N.FIELD.SCOPE=TYPE:VALUE or r:CODE; win.N.WAY (KB/s); procs.N drawing.N=PID:BYTES,...; gpm.N=1 g.N.METRIC=NUMBER
 *   up.N.LINK to.N.LINK (what is there: 0 the other GPU, 2 a switch) level.N.M p2p.N.WHICH nodes.N (mask) numa.N
 *
 *   refused.N=FIELD (a list with it is refused as a whole) g.first=N (of metrics a list with N or more is)
 *
 * What is not in the file is not supported (3). A GPU that was lost is not found (6) until the library is started anew. Handles
 * of an earlier start (of GPUs, sets, samples) are invalid (2): what the driver does with them it does not say.
 * How structures are laid out is told by `layouts`, for a test that compares them with nvidia-ml-py's. With OLD it is a driver
 * that has no fields, no second memory structure, and no events. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int R;
typedef struct dev { int n, start; } *D;
static struct dev devices[64][8];
static int gone[8], starts;
enum { OK, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, TIMEOUT = 10, LOST = 15 };

static int text(const char *key, char *out, size_t room) {
    char line[512];
    size_t n = strlen(key);
    int found = 0;
    const char *path = getenv("HOPTRACE_NVML_STUB");
    FILE *f = path ? fopen(path, "r") : NULL;
    if (!f) return 0;
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, key, n) && line[n] == '=') {
            line[strcspn(line, "\n")] = 0;
            snprintf(out, room, "%s", line + n + 1);
            found = 1;
        }
    fclose(f);
    return found;
}

static int number(unsigned long long *out, const char *name, int a, int b, int c) {
    char key[96], value[128];
    int n = snprintf(key, sizeof key, "%s", name);
    if (a >= 0) n += snprintf(key + n, sizeof key - n, ".%d", a);
    if (b >= 0) n += snprintf(key + n, sizeof key - n, ".%d", b);
    if (c >= 0) snprintf(key + n, sizeof key - n, ".%d", c);
    if (!text(key, value, sizeof value)) return 0;
    *out = strtoull(value, NULL, 0);
    return 1;
}

static unsigned long long of(const char *name, int a, int b, unsigned long long otherwise) {
    unsigned long long v;
    return number(&v, name, a, b, -1) ? v : otherwise;
}

static D handle(int n) {
    D d = &devices[starts % 64][n];
    d->n = n;
    d->start = starts;
    return d;
}

static R lost(D d) {
    if (d->start != starts) return INVALID;
    if (of("lost", d->n, -1, 0)) gone[d->n] = 1;
    if (gone[d->n]) return LOST;
    while (of("hang", d->n, -1, 0)) usleep(10000);
    return (R)of("fail", d->n, -1, OK);
}

static R value(D d, const char *name, int b, unsigned int *out) {
    unsigned long long v;
    R r;
    if ((r = lost(d))) return r;
    if (!number(&v, name, d->n, b, -1)) return UNSUPPORTED;
    *out = (unsigned int)v;
    return OK;
}

static int uuid_of(int n, char *out, size_t room) { return snprintf(out, room, "GPU-%08d-0000-0000-0000-000000000000", n); }
static void bus_of(int n, char *out, size_t room) { snprintf(out, room, "00000000:%02X:00.0", 0x17 + 0x10 * n); }

R nvmlInitWithFlags(unsigned int flags) {
    R r = (R)of("init", -1, -1, 0);
    if (!r) memset(gone, 0, sizeof gone), starts++;
    for (int n = 0; n < 8; n++) if (!r && of("lost", n, -1, 0)) gone[n] = 1;
    return r;
}
R nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(R r) { return "an error"; }
R nvmlSystemGetDriverVersion(char *out, unsigned int room) { return text("driver", out, room) ? OK : UNSUPPORTED; }
R nvmlDeviceGetCount_v2(unsigned int *out) { *out = (unsigned int)of("count", -1, -1, 0); return OK; }
R nvmlDeviceGetHandleByIndex_v2(unsigned int i, D *out) {
    int n = (int)of("index", (int)i, -1, i);
    *out = handle(n);
    return lost(*out);
}
R nvmlDeviceGetHandleByUUID(const char *uuid, D *out) {
    char own[64];
    for (int n = 0; n < 8; n++) {
        uuid_of(n, own, sizeof own);
        if (strcmp(own, uuid)) continue;
        if (gone[n]) return NOT_FOUND;
        *out = handle(n);
        return OK;
    }
    return NOT_FOUND;
}
R nvmlDeviceGetUUID(D d, char *out, unsigned int room) { uuid_of(d->n, out, room); return OK; }
R nvmlDeviceGetName(D d, char *out, unsigned int room) { snprintf(out, room, "NVIDIA Stub"); return OK; }

typedef struct { char legacy[16]; unsigned int domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
R nvmlDeviceGetPciInfo_v3(D d, Pci *out) { memset(out, 0, sizeof *out); bus_of(d->n, out->bus_id, 32); return OK; }

typedef struct { unsigned long long total, free, used; } Memory;
R nvmlDeviceGetMemoryInfo(D d, Memory *m) {
    R r;
    if ((r = lost(d))) return r;
    m->total = of("mem.total", d->n, -1, 0);
    m->free = of("mem.free", d->n, -1, 0);
    m->used = of("mem.used", d->n, -1, 0) + of("mem.reserved", d->n, -1, 0);
    return OK;
}
#ifndef OLD
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } Memory2;
R nvmlDeviceGetMemoryInfo_v2(D d, Memory2 *m) {
    R r;
    if ((r = lost(d))) return r;
    if (m->version != 0x02000028) return 25;
    m->total = of("mem.total", d->n, -1, 0);
    m->reserved = of("mem.reserved", d->n, -1, 0);
    m->free = of("mem.free", d->n, -1, 0);
    m->used = of("mem.used", d->n, -1, 0);
    return OK;
}

typedef struct { unsigned int id, scope; long long stamp, latency; unsigned int type; R r; unsigned long long value; } Field;
R nvmlDeviceGetFieldValues(D d, int n, Field *f) {
    R r;
    char key[64], value[96];
    if ((r = lost(d))) return r;
    for (int i = 0; i < n; i++) if (n > 1 && f[i].id == of("refused", d->n, -1, 0)) return INVALID;
    for (int i = 0; i < n; i++) {
        f[i].value = 0xABABABABABABABABull; /* undefined unless r is 0 */
        f[i].r = UNSUPPORTED;
        snprintf(key, sizeof key, "f.%d.%u.%u", d->n, f[i].id, f[i].scope);
        if (!text(key, value, sizeof value)) continue;
        char *colon = strchr(value, ':');
        if (value[0] == 'r') { f[i].r = atoi(colon + 1); continue; }
        f[i].r = OK;
        f[i].type = (unsigned int)atoi(value);
        if (f[i].type == 0) { double x = strtod(colon + 1, NULL); memcpy(&f[i].value, &x, 8); }
        else if (f[i].type == 1) { unsigned int x = (unsigned int)strtoull(colon + 1, NULL, 0); memcpy(&f[i].value, &x, 4); }
        else f[i].value = strtoull(colon + 1, NULL, 0);
    }
    return OK;
}
#endif

R nvmlDeviceGetClockInfo(D d, int type, unsigned int *out) { return value(d, "clock", type, out); }
/* Its new name, nvmlDeviceGetCurrentClocksEventReasons, is missing: a driver before 535. */
R nvmlDeviceGetCurrentClocksThrottleReasons(D d, unsigned long long *out) {
    unsigned int v = 0;
    R r = value(d, "reasons", -1, &v);
    *out = v;
    return r;
}
R nvmlDeviceGetMaxPcieLinkGeneration(D d, unsigned int *out) { return value(d, "gen", -1, out); }
R nvmlDeviceGetMaxPcieLinkWidth(D d, unsigned int *out) { return value(d, "width", -1, out); }
R nvmlDeviceGetCurrPcieLinkGeneration(D d, unsigned int *out) { return value(d, "gen", -1, out); }
R nvmlDeviceGetCurrPcieLinkWidth(D d, unsigned int *out) { return value(d, "width", -1, out); }
R nvmlDeviceGetPcieThroughput(D d, int way, unsigned int *out) { usleep(20000); return value(d, "win", way, out); }

R nvmlDeviceGetNvLinkState(D d, unsigned int link, unsigned int *out) { return value(d, "up", (int)link, out); }
R nvmlDeviceGetNvLinkRemoteDeviceType(D d, unsigned int link, unsigned int *out) { return value(d, "to", (int)link, out); }
R nvmlDeviceGetNvLinkRemotePciInfo_v2(D d, unsigned int link, Pci *out) {
    memset(out, 0, sizeof *out);
    bus_of(of("to", d->n, (int)link, 0) ? 7 : 1 - d->n, out->bus_id, 32);
    return lost(d);
}
R nvmlDeviceGetTopologyCommonAncestor(D a, D b, unsigned int *out) { return value(a, "level", b->n, out); }
R nvmlDeviceGetP2PStatus(D a, D b, int which, unsigned int *out) { return value(a, "p2p", which, out); }
R nvmlDeviceGetMemoryAffinity(D d, unsigned int n, unsigned long *out, int scope) {
    memset(out, 0, n * sizeof *out);
    out[0] = of("nodes", d->n, -1, 0);
    return out[0] ? OK : UNSUPPORTED;
}
R nvmlDeviceGetNumaNodeId(D d, unsigned int *out) { return value(d, "numa", -1, out); }

typedef struct { unsigned int gpu, memory; } Use;
R nvmlDeviceGetUtilizationRates(D d, Use *out) { out->memory = 0; return value(d, "busy", -1, &out->gpu); }

typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } Process;
static R processes(D d, const char *name, unsigned int *n, Process *out) {
    char key[32], value[256];
    unsigned int have = 0;
    R r;
    if ((r = lost(d))) return r;
    snprintf(key, sizeof key, "%s.%d", name, d->n);
    if (!text(key, value, sizeof value)) return UNSUPPORTED;
    for (char *p = strtok(value, ","); p; p = strtok(NULL, ",")) {
        if (out && have < *n) {
            out[have].pid = (unsigned int)atoi(p);
            out[have].used = strtoull(strchr(p, ':') + 1, NULL, 0);
        }
        have++;
    }
    if (have > (out ? *n : 0)) { *n = have; return SMALL; }
    *n = have;
    return OK;
}
R nvmlDeviceGetComputeRunningProcesses_v3(D d, unsigned int *n, Process *out) { return processes(d, "procs", n, out); }
R nvmlDeviceGetGraphicsRunningProcesses_v3(D d, unsigned int *n, Process *out) { return processes(d, "drawing", n, out); }

typedef struct { D device; unsigned long long type, data; unsigned int gi, ci; } Event;
#ifndef OLD
static int told, listens[8];
static int set_of;
R nvmlEventSetCreate(int **out) { memset(listens, 0, sizeof listens); set_of = starts; *out = &set_of; return OK; }
R nvmlDeviceRegisterEvents(D d, unsigned long long types, void *set) {
    R r = types & 8 ? lost(d) : UNSUPPORTED;
    if (!r) listens[d->n] = 1;
    return r;
}
R nvmlEventSetWait_v2(void *set, Event *out, unsigned int ms) {
    char value[64];
    int number, n, xid;
    if (set_of != starts) return INVALID;
    for (n = 0; n < 8; n++) if (listens[n] && gone[n]) return LOST; /* at once, and so it stays */
    for (unsigned int waited = 0; waited < ms; waited += 5) {
        int there = text("xid", value, sizeof value) && sscanf(value, "%d:%d:%d", &number, &n, &xid) == 3;
        if (there && number > told && listens[n]) {
            told = number;
            memset(out, 0, sizeof *out);
            out->device = handle(n);
            out->type = 8;
            out->data = (unsigned long long)xid;
            return OK;
        }
        usleep(5000);
    }
    return TIMEOUT;
}
#endif

typedef struct { unsigned int version, supported; } Support;
R nvmlGpmQueryDeviceSupport(D d, Support *out) { out->supported = (unsigned int)of("gpm", d->n, -1, 0); return lost(d); }
R nvmlGpmSampleAlloc(int **out) { *out = calloc(2, sizeof **out); (*out)[1] = starts; return OK; }
R nvmlGpmSampleGet(D d, int *sample) {
    sample[0] = d->n;
    return sample[1] == starts ? lost(d) : INVALID;
}
typedef struct { unsigned int id; R r; double value; char *names[3]; } Metric;
typedef struct { unsigned int version, n; int *first, *second; Metric metrics[1]; } Metrics;
R nvmlGpmMetricsGet(Metrics *m) {
    char key[48], value[64];
    for (unsigned int i = 0; i < m->n; i++) if (m->metrics[i].id >= of("g.first", -1, -1, 999)) return INVALID;
    if (m->first == m->second || *m->first != *m->second) return INVALID;
    for (unsigned int i = 0; i < m->n; i++) {
        snprintf(key, sizeof key, "g.%d.%u", *m->second, m->metrics[i].id);
        m->metrics[i].r = text(key, value, sizeof value) ? OK : UNSUPPORTED;
        m->metrics[i].value = m->metrics[i].r ? -1 : strtod(value, NULL);
    }
    return OK;
}

#define AT(S, M) at += snprintf(out + at, room - at, " %zu:%zu", offsetof(S, M), sizeof(((S *)0)->M))
#define OF(S, NAME) at += snprintf(out + at, room - at, "%s%s %zu", at ? "\n" : "", NAME, sizeof(S))
/* A line for each structure: its name in nvidia-ml-py, its size, and OFFSET:SIZE of each member. */
int layouts(char *out, size_t room) {
    size_t at = 0;
    OF(Memory, "c_nvmlMemory_t"); AT(Memory, total); AT(Memory, free); AT(Memory, used);
    OF(Pci, "nvmlPciInfo_t"); AT(Pci, legacy); AT(Pci, domain); AT(Pci, bus); AT(Pci, device); AT(Pci, id); AT(Pci, subsystem);
    AT(Pci, bus_id);
    OF(Use, "c_nvmlUtilization_t"); AT(Use, gpu); AT(Use, memory);
    OF(Process, "c_nvmlProcessInfo_v3_t"); AT(Process, pid); AT(Process, used); AT(Process, gi); AT(Process, ci);
    OF(Event, "c_nvmlEventData_t"); AT(Event, device); AT(Event, type); AT(Event, data); AT(Event, gi); AT(Event, ci);
    OF(Support, "c_nvmlGpmSupport_t"); AT(Support, version); AT(Support, supported);
    OF(Metric, "c_nvmlGpmMetric_t"); AT(Metric, id); AT(Metric, r); AT(Metric, value); AT(Metric, names);
#ifndef OLD
    OF(Memory2, "c_nvmlMemory_v2_t"); AT(Memory2, version); AT(Memory2, total); AT(Memory2, reserved); AT(Memory2, free);
    AT(Memory2, used);
    OF(Field, "c_nvmlFieldValue_t"); AT(Field, id); AT(Field, scope); AT(Field, stamp); AT(Field, latency); AT(Field, type);
    AT(Field, r); AT(Field, value);
    /* of this one the list at its end is as long as the caller's */
    OF(Metrics, "c_nvmlGpmMetricsGet_t"); AT(Metrics, version); AT(Metrics, n); AT(Metrics, first); AT(Metrics, second);
    AT(Metrics, metrics);
#endif
    return (int)at;
}
