{{- /* Parts of the admission policies. */ -}}

{{- /* Binding of a policy without parameters, called with its name: denies, in all namespaces. */ -}}
{{- define "tessera.binding" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ . }}
spec:
  policyName: {{ . }}
  validationActions: [Deny]
{{- end -}}

{{- /* Matches only requests of node plugins, not those of kubelets and administrators. */ -}}
{{- define "tessera.byANodePlugin" -}}
name: by-a-node-plugin
expression: request.userInfo.username == 'system:serviceaccount:{{ .Release.Namespace }}:tessera-node'
{{- end -}}

{{- /* The node to which the token is bound, or an empty string. */ -}}
{{- define "tessera.node" -}}
name: node
expression: "request.userInfo.extra[?'authentication.kubernetes.io/node-name'][0].orValue('')"
{{- end -}}

{{- /* Description of the token in messages. */ -}}
{{- define "tessera.thisToken" -}}
'this token is ' + (variables.node == '' ? 'bound to no node' : 'of node ' + variables.node)
{{- end -}}

{{- /*
True if an expression is the name of the node's pool, or of that of its monitor devices (driver/slices/slice_names.py). Names that are
too long end in a hash, which CEL cannot compute: only the part before it is compared.
*/ -}}
{{- define "tessera.isOwnPool" -}}
[variables.pool, variables.pool + '-monitor'].exists(own, {{ . }} == own || (own.size() > 253 && {{ . }}.size() > 200 && own.startsWith({{ . }}.substring(0, {{ . }}.size() - 11))))
{{- end -}}

{{- define "tessera.pool" -}}
name: pool
expression: variables.node + '-{{ .Values.driverName }}'
{{- end -}}

{{- /* A list, or an empty one if it is absent or null. */ -}}
{{- define "tessera.listOf" -}}
(has({{ . }}) && {{ . }} != null ? {{ . }} : [])
{{- end -}}

{{- /* The objects of a policy about new claims. */ -}}
{{- define "tessera.claimsAndTemplates" -}}
matchConstraints:
  # The API server converts claims in an older API version first.
  matchPolicy: Equivalent
  resourceRules:
    - apiGroups: [resource.k8s.io]
      apiVersions: [v1]
      operations: [CREATE]
      resources: [resourceclaims, resourceclaimtemplates]
{{- end -}}

{{- /* Variables of a policy about claims and templates: the requests by name, and their names. */ -}}
{{- define "tessera.askedByName" -}}
- name: devices
  expression: "has(dyn(object).spec.spec) ? dyn(object).spec.spec.devices : dyn(object).spec.devices"
- name: requests
  expression: {{ include "tessera.listOf" "variables.devices.requests" | quote }}
# Requests by name as in allocation results; a request with alternatives counts as one entry per alternative.
- name: asked
  expression: >-
    variables.requests.transformMapEntry(number, each, has(each.exactly) ? {each.name: each.exactly}
    : each.firstAvailable.transformMapEntry(place, one, {each.name + '/' + one.name: one}))
# Request names in the order of the manifest (names contain no commas).
- name: names
  expression: >-
    variables.asked.size() == 0 ? [] : variables.requests.map(each, has(each.exactly) ? each.name
    : each.firstAvailable.map(one, each.name + '/' + one.name).join(',')).join(',').split(',')
{{- end -}}

{{- /*
Condition of policies about claims: the scheduler creates the claim of a pod with extended resources, and would repeat a refused
creation for ever. Only schedulers may allocate claims, so nobody else gets around the policy with the annotation.
*/ -}}
{{- define "tessera.notMadeByAScheduler" -}}
- name: not-made-by-a-scheduler
  expression: >-
    !(has(object.metadata.annotations) && 'resource.kubernetes.io/extended-resource-claim' in object.metadata.annotations &&
    authorizer.group('resource.k8s.io').resource('resourceclaims').subresource('status').namespace(request.namespace)
    .check('update').allowed())
{{- end -}}
